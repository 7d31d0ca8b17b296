"""Chat and text completions without a session, before a scripted engine and with the real client."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from gateway_engine import Served, served
from shoal.gateway.answer_text import AnswerText
from shoal.gateway.request_log import RequestRecord
from shoal.interfaces import LogitRules

ASK: list[Any] = [{"role": "user", "content": "what is 3 + 4?"}]
TWO_CALLS = "".join(f'<tool_call>\n{{"name": "add", "arguments": {{"x": {x}}}}}\n</tool_call>' for x in (3, 4))
THOUGHT = "<think>\nthree and four\n</think>\n\nseven, as ever"


def run(scenario: Callable[[Served, openai.AsyncOpenAI], Awaitable[None]], *script: str | None, **options: Any) -> None:
    async def main() -> None:
        async with (
            served(*script, is_open=True, **options) as one,
            openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="-", max_retries=0) as client,
        ):
            await scenario(one, client)

    asyncio.run(main())


def test_several_choices_are_answers_of_their_own_under_one_unique_id() -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(model="m", messages=ASK, n=3, seed=5)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert {choice.message.content for choice in answer.choices} == {"one", "two", "three"}
        seeds = [sampling.seed for _, sampling in one.engine.received]
        assert seeds[0] == 5
        assert len(set(seeds)) == 3
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(one.engine.received[0][0])
        assert answer.usage.completion_tokens == sum(len(drawn.token_ids) for drawn in one.engine.drawn)
        others = [await client.chat.completions.create(model="m", messages=ASK) for _ in range(2)]
        assert len({answer.id, *(other.id for other in others)}) == 3

    run(scenario, "one", "two", "three")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", {"messages": ASK, "n": 3}),
        ("completions", {"prompt": "count", "n": 3}),
        ("completions", {"prompt": ["one", "two", "three"]}),
    ],
)
def test_a_repeated_request_without_a_session_gets_an_answer_for_each_choice(path: str, asked: dict[str, Any]) -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        retry = {"x-stainless-retry-count": "1"}
        async with aiohttp.ClientSession() as http, http.post(f"{one.url}/v1/{path}", json=asked, headers=retry) as got:
            assert got.status == 200, await got.text()
            choices = (await got.json())["choices"]
        said = {choice.get("text") or choice["message"]["content"] for choice in choices}
        assert said == {"one", "two", "three"}

    run(scenario, "one", "two", "three")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_the_engine_s_work(stream: bool) -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        create: Any = client.completions.create
        asked = {"model": "m", "prompt": "count", "stop": [" 3", "xx"], "max_tokens": 500, "stream": stream}
        if stream:
            chunks = [chunk async for chunk in await create(**asked)]
            text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
        else:
            (choice,) = (await create(**asked, logprobs=0)).choices
            text, reason = choice.text, choice.finish_reason
            assert "".join(choice.logprobs.tokens) == "1 2"
        assert (text, reason) == ("1 2", "stop")
        assert one.engine.streamed < len("1 2 3") + 9

    run(scenario, "1 2 3 4 5 6 7 8 9 10 11 12 13 14")


def test_a_stream_comes_token_by_token_and_parts_the_thought_from_the_answer() -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        seen, said = list[int](), {"reasoning_content": "", "content": ""}
        stream = await client.chat.completions.create(
            model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            for choice in chunk.choices:
                for name in said:
                    said[name] += getattr(choice.delta, name, None) or ""
                seen.append(one.engine.streamed)
        assert said == {"reasoning_content": "three and four", "content": "seven, as ever"}
        assert len(set(seen)) > 10  # texts came while the engine went on
        assert chunk.usage is not None
        assert chunk.usage.completion_tokens == len(one.engine.drawn[0].token_ids)

    run(scenario, THOUGHT, token_s=0.001)


def test_events_of_other_apis_come_token_by_token_and_add_up_to_the_whole_answer() -> None:
    """Each API's own client puts the events together; it raises where their order is not the API's."""
    asked: dict[str, Any] = {"model": "m", "messages": ASK, "max_tokens": 500}

    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        async with anthropic.AsyncAnthropic(base_url=one.url, api_key="-", max_retries=0) as other:
            async with other.messages.stream(**asked) as stream:
                seen = {one.engine.streamed async for event in stream if event.type == "content_block_delta"}
                message = await stream.get_final_message()
            assert len(seen) > 10  # texts came while the engine went on
            assert [(block.type, block.to_dict()[block.type]) for block in message.content] == [
                ("thinking", "three and four"),
                ("text", "seven, as ever"),
            ]
            assert message.usage.output_tokens == len(one.engine.drawn[0].token_ids)
            assert message.stop_reason == "end_turn"
        seen = set()
        async with client.responses.stream(model="m", input="3 + 4?") as events:
            numbers = []
            async for event in events:
                numbers.append(event.sequence_number)
                if event.type.endswith("text.delta"):
                    seen.add(one.engine.streamed)
            final = await events.get_final_response()
        assert numbers == list(range(len(numbers)))
        assert len(seen) > 10
        assert [item.type for item in final.output] == ["reasoning", "message"]
        assert final.output_text == "seven, as ever"
        cut = await client.responses.create(model="m", input="3 + 4?", max_output_tokens=3, stream=True)
        *_, last = [event async for event in cut]
        assert (last.type, last.response.usage.output_tokens) == ("response.incomplete", 3)
        tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}}
        async with client.responses.stream(model="m", input="3 + 4?", tools=[tool]) as events:
            kinds = [event.type async for event in events]
            final = await events.get_final_response()
        assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
        assert kinds.count("response.created") == kinds.count("response.completed") == 1
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model="m", input="x", previous_response_id=final.id, stream=True)

    run(scenario, THOUGHT, THOUGHT, THOUGHT, f"let me see {TWO_CALLS}", token_s=0.001)


@pytest.mark.parametrize("stop", ["!", ", as", "</think>"])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("text", [THOUGHT, "grüße, 你好 as </thi 🐟!", "so</think>", "<think>never ends"])
def test_a_text_read_piece_by_piece_is_the_text_read_at_once(text: str, chat: bool, stop: str) -> None:
    from chat_templates import renderer

    made = renderer("qwen3")
    ids = [token for char in text for token in made.token_ids(char)]
    whole, pieces = (AnswerText(made, (stop,), chat=chat) for _ in range(2))
    whole.add(ids, last=True)
    shown = [""]
    for i, token in enumerate(ids):
        pieces.add([token], last=i == len(ids) - 1)
        assert pieces.content.startswith(shown[-1])
        shown.append(pieces.content)
        if pieces.stopped:
            break
    if text != "so</think>":  # whose thought is known too late
        assert (pieces.content, pieces.reasoning) == (whole.content, whole.reasoning)
    assert stop not in pieces.content


def test_logprobs_have_the_text_and_bytes_of_their_tokens_and_an_echo_those_of_the_prompt() -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        chat = await client.chat.completions.create(model="m", messages=ASK, logprobs=True)
        assert chat.choices[0].logprobs is not None
        content = chat.choices[0].logprobs.content or []
        spelt = b"".join(bytes(entry.bytes or []) for entry in content)
        assert spelt.decode().startswith("für 🐟")
        assert content[0].token == "f"
        prompt = one.engine.renderer.token_ids("3 + 4 =")
        echoed = await client.completions.create(
            model="m", prompt=[prompt, prompt], logprobs=1, echo=True, max_tokens=1
        )
        assert [choice.index for choice in echoed.choices] == [0, 1]
        for choice in echoed.choices:
            assert choice.text == "3 + 4 =7"
            found = choice.logprobs
            assert found is not None
            assert found.token_logprobs is not None
            assert found.tokens is not None
            assert (found.token_logprobs[0], len(found.token_logprobs)) == (None, len(prompt) + 1)
            assert "".join(found.tokens) == choice.text

    run(scenario, "für 🐟", "7…", "7…")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temprature": 0.5}, "temperature"),
        ({"model": "other"}, "'m'"),
        ({"n": 0}, "n"),
        ({"repetition_penalty": 1.3}, "repetition_penalty"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"stop": ["a"] * 99}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_k": 1.5}, "top_k"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_no_one_knows_or_can_have_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        body = {"model": "m", "messages": ASK, **fields}
        async with aiohttp.ClientSession() as http, http.post(f"{one.url}/v1/chat/completions", json=body) as answer:
            error = (await answer.json())["error"]
            assert answer.status == (404 if "model" in fields else 400)
            assert next(iter(fields)) in error["message"]
            assert named in error["message"]
            if "model" in fields:
                assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert one.engine.received == []

    run(scenario)


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "top_logprobs", "repetition_penalty"])
def test_a_session_refuses_what_would_make_its_logprobs_wrong(field: str) -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        url = f"{one.url}/s/{one.gateway.sessions.open().token}/v1/chat/completions"
        body = {"messages": ASK, field: 2}
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
            assert answer.status == 400
            assert field in (await answer.json())["error"]["message"]

    run(scenario)


def test_an_engine_that_fails_gives_a_status_before_the_first_token() -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="engine is gone"):
                await client.chat.completions.create(model="m", messages=ASK, stream=stream)

    run(scenario, None, None)


def test_every_request_is_logged_without_its_words_or_keys() -> None:
    records: list[RequestRecord] = []

    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        await client.chat.completions.create(model="m", messages=ASK)
        async for _ in await client.chat.completions.create(model="m", messages=ASK, stream=True):
            pass
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt", messages=ASK)
        session = one.gateway.sessions.open()
        url = f"{one.url}/s/{session.token}/v1/chat/completions"
        async with aiohttp.ClientSession() as http, http.post(url, json={"messages": ASK}) as answer:
            assert answer.status == 200
        said = [(record.status, record.completion_tokens, record.finish) for record in records]
        assert said == [(200, 3, "stop"), (200, 3, "stop"), (404, 0, ""), (200, 3, "stop")]
        assert records[1].first_token_s > 0
        assert "'gpt'" in records[2].error
        assert not any(session.token in record.line or "3 + 4" in record.line for record in records)

    run(scenario, on_request=records.append)


def test_rules_of_the_logits_reach_the_engine() -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        await client.chat.completions.create(
            model="m",
            messages=ASK,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"7": -3},
            logprobs=True,
            top_logprobs=2,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            extra_body={"top_k": 3, "min_p": 0.1},
        )
        assert one.engine.seen_rules == [LogitRules(2, 0.5, -0.5, ((7, -3.0),))]
        assert (one.engine.received[0][1].top_k, one.engine.received[0][1].min_p) == (3, 0.1)
        assert json.dumps(schema)[1:] in one.engine.received[0][1].grammar

    run(scenario)


@pytest.mark.parametrize(("field", "value"), [("top_k", -2.5), ("min_p", 2), ("stop", "x"), ("n", 2)])
def test_tokens_in_and_out_refuse_sampling_that_they_do_not_know(field: str, value: object) -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        for sampling, status in (({"max_tokens": 3, "top_k": 0, "min_p": 0.0}, 200), ({field: value}, 400)):
            body = {"token_ids": [1, 2, 3], "sampling_params": sampling, "priority": 1, "model": None}
            async with aiohttp.ClientSession() as http:
                answer = await http.post(f"{one.url}/inference/v1/generate", json=body)
                assert answer.status == status

    run(scenario)
