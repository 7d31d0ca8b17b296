"""The gateway with the real clients of OpenAI and Anthropic, before a scripted engine."""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from gateway_engine import CONTEXT, Served, served
from shoal.gateway.sessions import OpenRequest, SessionLimits
from shoal.gateway.token_tree import TokenTree
from shoal.trainer.advantage import rows
from shoal.turn_tree import prompt_ids
from shoal.types import Reward, Rollout, Sampling

ASK: list[Any] = [{"role": "user", "content": "what is 3 + 4?"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TWO_CALLS = (
    '<tool_call>{"name": "add", "arguments": {"x": 3}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"x": 4}}</tool_call>'
)


def run(scenario: Callable[[Served], Awaitable[None]], *script: str | None, **options: Any) -> None:
    async def main() -> None:
        async with served(*script, **options) as one:
            await scenario(one)

    asyncio.run(main())


def agent(one: Served, **options: Any) -> tuple[openai.AsyncOpenAI, TokenTree]:
    session = one.gateway.sessions.open(OpenRequest(**options))
    return openai.AsyncOpenAI(base_url=f"{one.url}/s/{session.token}/v1", api_key="-"), session.tree


def check_exact(one: Served, tree: TokenTree) -> None:
    """Every drawn token is trained once, after the very tokens that the engine had received."""
    trained = rows(Rollout("r", tree.messages(), tree.turns(), Reward(1.0)), 1.0)
    kept = [turn.completion for turn in tree.turns()]
    assert sum(sum(row.mask) for row in trained) == sum(len(completion.token_ids) for completion in kept)
    turns = tree.turns()
    for i, turn in enumerate(turns):
        assert any(
            prompt_ids(turns, i) == prompt and turn.completion == completion
            for (prompt, _), completion in zip(one.engine.received, one.engine.drawn, strict=True)
        )


def test_a_conversation_with_tools_trains_on_one_row_of_sampled_tokens() -> None:
    async def scenario(one: Served) -> None:
        client, tree = agent(one)
        async with client:
            first = await client.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls"
            assert message.tool_calls is not None
            assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"x": 3}, {"x": 4}]
            results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls]
            history: list[Any] = [*ASK, message.model_dump(exclude_none=True), *results]
            second = await client.chat.completions.create(model="m", messages=history, tools=TOOLS)
            assert second.choices[0].message.content == "the answer is 7"
            history += [second.choices[0].message.model_dump(), {"role": "user", "content": "thanks"}]
            await client.chat.completions.create(model="m", messages=history, tools=TOOLS)
        assert [one.parent for one in tree.generations] == [None, 0, 1]
        assert len(rows(Rollout("r", (), tree.turns(), Reward(1.0)), 1.0)) == 1
        check_exact(one, tree)

    run(scenario, f"<think>\nhm\n</think>\n\n{TWO_CALLS}", "<think>\nso\n</think>\n\nthe answer is 7", "bye")


def test_a_stream_gives_what_a_body_gives() -> None:
    async def scenario(one: Served) -> None:
        client, tree = agent(one)
        async with client:
            stream = await client.chat.completions.create(
                model="m", messages=ASK, tools=TOOLS, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or ()]
        assert [call.index for call in calls] == [0, 1]
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage is not None
        assert tree.generations[0].id in tree._delivered

    run(scenario, TWO_CALLS, delay_s=0.15, keep_alive_s=0.05)


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/responses", "v1/messages"])
def test_no_event_of_a_stream_comes_before_the_answer_is_whole_and_until_then_comments_come(path: str) -> None:
    asked = {"model": "m", "stream": True, "max_tokens": 500, **({"input": "hi"} if "responses" in path else {})}

    async def scenario(one: Served) -> None:
        session, seen = one.gateway.sessions.open(), set[tuple[bytes, int]]()
        one.engine.gate.clear()
        async with aiohttp.ClientSession() as http:
            url = f"{one.url}/s/{session.token}/{path}"
            async with http.post(url, json={"messages": ASK, **asked}) as response:
                assert response.status == 200
                async for line in response.content:
                    seen.add((line.partition(b":")[0].strip(), len(one.engine.drawn)))
                    one.engine.gate.set()  # the first line has come
        assert (b"", 0) in seen
        assert (b"data", 1) in seen
        assert not {(b"event", 0), (b"data", 0)} & seen

    run(scenario, "one two three", keep_alive_s=0.02)


def test_anthropic_s_client_uses_tools_and_streams() -> None:
    async def scenario(one: Served) -> None:
        session = one.gateway.sessions.open()
        tool: Any = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
        asked: dict[str, Any] = {"model": "m", "max_tokens": 500, "tools": [tool], "system": "be brief"}
        async with anthropic.AsyncAnthropic(base_url=f"{one.url}/s/{session.token}", api_key="-") as client:
            first = await client.messages.create(messages=ASK, **asked)
            assert first.stop_reason == "tool_use"
            uses = [block for block in first.content if block.type == "tool_use"]
            assert [use.input for use in uses] == [{"x": 3}, {"x": 4}]
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": "7"} for use in uses]
            history: list[Any] = [*ASK, {"role": "assistant", "content": first.content}]
            history.append({"role": "user", "content": results})
            async with client.messages.stream(messages=history, **asked) as stream:
                final = await stream.get_final_message()
            assert [block.text for block in final.content if block.type == "text"] == ["seven"]
            counted = await client.messages.count_tokens(model="m", messages=ASK, system="be brief", tools=[tool])
            assert counted.input_tokens == first.usage.input_tokens
        assert [generation.parent for generation in session.tree.generations] == [None, 0]
        check_exact(one, session.tree)

    run(scenario, f"let me see {TWO_CALLS}", "seven")


def test_a_retry_after_the_client_gave_up_finds_the_call_under_way() -> None:
    async def scenario(one: Served) -> None:
        session = one.gateway.sessions.open()
        url = f"{one.url}/s/{session.token}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", timeout=0.4, max_retries=2) as client:
            answer = await client.chat.completions.create(model="m", messages=ASK)
        assert answer.choices[0].message.content == "slow"
        assert len(one.engine.received) == 1
        check_exact(one, session.tree)

    run(scenario, "slow", delay_s=0.8)


def test_a_retry_is_answered_when_the_session_s_limit_is_reached() -> None:
    async def scenario(one: Served) -> None:
        session = one.gateway.sessions.open(OpenRequest(limits=SessionLimits(generations=1)))
        url, retry = f"{one.url}/s/{session.token}/v1/chat/completions", {"x-stainless-retry-count": "1"}
        async with aiohttp.ClientSession() as http:
            for headers, status in (({}, 200), (retry, 200), ({}, 410)):
                async with http.post(url, json={"messages": ASK}, headers=headers) as answer:
                    assert answer.status == status
        assert len(one.engine.received) == 1

    run(scenario)


def test_the_server_s_sampling_wins_and_concurrent_calls_become_siblings() -> None:
    async def scenario(one: Served) -> None:
        client, tree = agent(one, sampling=Sampling(50, temperature=0.7, top_p=0.9))
        async with client:
            create = client.chat.completions.create
            await asyncio.gather(*(create(model="m", messages=ASK, temperature=0.1, max_tokens=n) for n in (9, 90)))
        drawn = [sampling for _, sampling in one.engine.received]
        assert {(sampling.temperature, sampling.top_p) for sampling in drawn} == {(0.7, 0.9)}
        assert sorted(sampling.max_tokens for sampling in drawn) == [9, 50]
        assert [generation.parent for generation in tree.generations] == [None, None]
        check_exact(one, tree)

    run(scenario, delay_s=0.05)


def test_an_aborted_answer_goes_on_and_the_client_sees_one() -> None:
    async def scenario(one: Served) -> None:
        one.engine.aborts = 1
        client, tree = agent(one)
        async with client:
            create: Any = client.chat.completions.create
            answer = await create(model="m", messages=ASK, logprobs=True, extra_body={"return_token_ids": True})
        assert answer.choices[0].message.content == "first second"
        spans = answer.choices[0].weight_versions
        assert [span["version"] for span in spans] == [0, 1]
        (generation,) = tree.generations
        assert [entry.token_id for entry in answer.choices[0].logprobs.content] == list(generation.completion.token_ids)
        assert answer.prompt_token_ids == list(tree.prompt_ids(generation))
        assert one.engine.received[1][0] == one.engine.received[0][0] + one.engine.drawn[0].token_ids

    run(scenario, "first ", "second", pooled=True)


def test_an_engine_that_dies_is_reported_and_the_next_request_is_answered() -> None:
    async def scenario(one: Served) -> None:
        client, tree = agent(one)
        async with client.with_options(max_retries=0) as hasty:
            with pytest.raises(openai.InternalServerError, match="engine is gone"):
                await hasty.chat.completions.create(model="m", messages=ASK)
            answer = await hasty.chat.completions.create(model="m", messages=ASK)
        assert answer.choices[0].message.content == "back"
        assert len(tree.generations) == 1

    run(scenario, None, "back")


def test_text_completions_take_texts_and_tokens() -> None:
    async def scenario(one: Served) -> None:
        client, tree = agent(one)
        async with client:
            text = await client.completions.create(model="m", prompt="3 + 4 =", max_tokens=50)
            await client.completions.create(model="m", prompt=[1, 2, 3])
            models = await client.models.list()
        assert text.choices[0].text == " 7"
        assert [prompt for prompt, _ in one.engine.received] == [
            tuple(one.engine.renderer.token_ids("3 + 4 =")),
            (1, 2, 3),
        ]
        assert models.data[0].model_extra["max_model_len"] == CONTEXT
        check_exact(one, tree)

    run(scenario, " 7")


def test_an_agent_that_renders_by_itself_trains_on_one_row() -> None:
    async def scenario(one: Served) -> None:
        session = one.gateway.sessions.open()
        prompt = [5, 6, 7]
        async with aiohttp.ClientSession() as http:
            for _ in range(2):
                asked = {"token_ids": prompt, "sampling_params": {"max_tokens": 20}}
                url = f"{one.url}/s/{session.token}/inference/v1/generate"
                async with http.post(url, json=asked) as answer:
                    body = await answer.json()
                assert body["prompt_token_ids"] == prompt
                prompt = [*prompt, *body["choices"][0]["token_ids"], 9]
        assert len(rows(Rollout("r", (), session.tree.turns(), Reward(1.0)), 1.0)) == 1
        check_exact(one, session.tree)

    run(scenario, "one", "two")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2000),
        ("stop", ["x"] * 17),
        ("presence_penalty", 0.5),
        ("logit_bias", {"5": 1.0}),
        ("response_format", {"type": "grammar"}),
        ("tool_choice", "required"),
        ("max_tokens", 0),
        ("chat_template_kwargs", {"chat_template": "{{ 7 * 7 }}"}),
        ("temperature", -1),
        ("top_p", 0),
        ("tools", [{"type": "function"}]),
        ("messages", []),
        ("messages", [{"role": "wizard", "content": ""}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
        ("messages", [{"role": "user", "content": "x " * 3 * CONTEXT}]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(field: str, value: object) -> None:
    async def scenario(one: Served) -> None:
        body, url = {"model": "m", "messages": ASK, field: value}, f"{one.url}/s/{one.gateway.sessions.open().token}"
        async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 400
            assert field in (await answer.json())["error"]["message"]
        assert one.engine.received == []

    run(scenario)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400),
        (b'{"tools": ' + b"[" * 100_000, 400),
        (b'{"messages": "' + b"x" * (2 << 20) + b'"}', 413),
        (b"", 400),
    ],
)
def test_hostile_bodies_get_a_clear_status(body: bytes, status: int) -> None:
    async def scenario(one: Served) -> None:
        async with aiohttp.ClientSession() as http:
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/completions"):
                async with http.post(
                    one.url + path, data=io.BytesIO(body), headers={"Content-Type": "application/json"}
                ) as answer:
                    assert answer.status == status
                    assert (await answer.json())["error"]["message"]

    run(scenario, is_open=True)


def test_an_unknown_session_gets_401_and_an_ended_one_410() -> None:
    async def scenario(one: Served) -> None:
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{one.url}/v1/chat/completions", json={"messages": ASK}) as answer:
                assert answer.status == 401
            opening = {"sampling": {"max_tokens": 20}, "limits": {"generations": 1}}
            async with http.post(f"{one.url}/v1/sessions", json=opening) as answer:
                opened = await answer.json()
            key = {"Authorization": f"Bearer {opened['api_key']}"}
            for status in (200, 410):
                body = {"messages": ASK}
                async with http.post(f"{one.url}/v1/chat/completions", json=body, headers=key) as answer:
                    assert answer.status == status
            async with http.post(f"{opened['anthropic_base_url']}/end") as answer:
                exported = await answer.json()
            async with http.post(f"{opened['openai_base_url']}/chat/completions", json={"messages": ASK}) as answer:
                assert answer.status == 410
            async with http.post(f"{opened['anthropic_base_url']}/end") as answer:
                assert answer.status == 410
            async with http.get(f"{one.url}/metrics") as answer:
                text = await answer.text()
        assert exported["turns"][0]["token_ids"] == list(one.engine.drawn[0].token_ids)
        assert "shoal_gateway_forced_first_total 1" in text

    run(scenario)
