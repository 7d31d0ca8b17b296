"""Fields that agent frameworks send by default, through the real clients, in a session and out of it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from gateway_engine import Served, served
from shoal.trainer.advantage import rows
from shoal.types import FinishReason, Reward, Rollout

ASK: list[Any] = [{"role": "user", "content": "what is 3 + 4?"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TWO_CALLS = "".join(f'<tool_call>\n{{"name": "add", "arguments": {{"x": {x}}}}}\n</tool_call>' for x in (3, 4))
Ask = Callable[[Served, str], Awaitable[None]]


def run(ask: Ask, *script: str, **options: Any) -> None:
    """Asks in a session and out of it; `script` is said in each."""

    async def main() -> None:
        async with served(*script, *script, is_open=True, **options) as one:
            await ask(one, one.url)
            session = one.gateway.sessions.open()
            first = len(one.engine.received)
            await ask(one, f"{one.url}/s/{session.token}")
            turns = session.tree.turns()
            trained = rows(Rollout("r", session.tree.messages(), turns, Reward(1.0)), 1.0)
            sampled = sum(len(turn.completion.token_ids) for turn in turns)
            assert sum(sum(row.mask) for row in trained) == sampled > 0
            assert len(one.engine.received) > first

    asyncio.run(main())


def of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("style", ["qwen2.5", "qwen3"])
def test_a_stop_text_ends_the_answer_and_what_was_sampled_up_to_it_is_trained(style: str, tools: bool) -> None:
    async def ask(one: Served, url: str) -> None:
        async with of(url) as client:
            offered = {"tools": [TOOL]} if tools else {}
            for stream in (False, True):
                asked: dict[str, Any] = {"model": "m", "messages": ASK, "stop": ["Observation:"], **offered}
                if stream:
                    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
                    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                    reason = chunks[-1].choices[0].finish_reason
                else:
                    asked["extra_body"] = {"return_token_ids": True}
                    (choice,) = (await client.chat.completions.create(**asked)).choices
                    text, reason = choice.message.content, choice.finish_reason
                    kept = one.engine.renderer.text(choice.token_ids)
                    assert kept == "x " * 60 + "Observation:"
                assert (text, reason) == ("x " * 60, "stop")

    said = "x " * 60 + "Observation: seven" + " and so on" * 40
    run(ask, said, said, style=style)


def test_a_stop_text_within_a_thought_ends_nothing_and_a_call_before_it_is_kept() -> None:
    async def ask(one: Served, url: str) -> None:
        async with of(url) as client:
            answer = await client.chat.completions.create(
                model="m", messages=ASK, stop=["Observation:"], tools=[TOOL], parallel_tool_calls=True
            )
            message = answer.choices[0].message
            assert [call.function.name for call in message.tool_calls or []] == ["add", "add"]
            assert "Observation:" in message.model_extra["reasoning_content"]  # type: ignore[index]

    run(ask, f"<think>\nObservation: none\n</think>\n\n{TWO_CALLS}\nObservation: 7", style="qwen3")


def test_without_parallel_calls_the_answer_ends_after_its_first() -> None:
    async def ask(one: Served, url: str) -> None:
        async with of(url) as client, anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as other:
            asked: dict[str, Any] = {"model": "m", "tools": [TOOL], "parallel_tool_calls": False}
            chat = await client.chat.completions.create(messages=ASK, **asked)
            assert len(chat.choices[0].message.tool_calls or []) == 1
            assert chat.choices[0].finish_reason == "tool_calls"
            function: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}}
            response = await client.responses.create(input="3 + 4?", **{**asked, "tools": [function]})
            assert [item.type for item in response.output] == ["function_call"]
            choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
            tool: Any = {"name": "add", "input_schema": {"type": "object"}}
            message = await other.messages.create(
                model="m", max_tokens=500, messages=ASK, tools=[tool], tool_choice=choice
            )
            assert [block.type for block in message.content] == ["tool_use"]
            assert message.stop_reason == "tool_use"

    run(ask, *[TWO_CALLS] * 3, style="qwen2.5")


def test_n_answers_become_choices_and_branches_with_one_prompt() -> None:
    async def ask(one: Served, url: str) -> None:
        async with of(url) as client:
            answer = await client.chat.completions.create(model="m", messages=ASK, n=3)
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
            assert {choice.message.content for choice in answer.choices} == {"one", "two", "three"}
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(one.engine.received[-1][0])
            texts = await client.completions.create(model="m", prompt=["a", "b"], n=2)
            assert [choice.text for choice in texts.choices] == ["ok"] * 4

    run(ask, "one", "two", "three", *["ok"] * 4)


def test_a_forced_call_and_a_format_reach_the_engine_as_a_grammar() -> None:
    """The engine samples under the grammar; see tests/trainer/test_trained_grammar.py."""
    named: Any = {"type": "function", "function": {"name": "add"}}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    form: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    tool: Any = {"name": "add", "input_schema": {"type": "object"}}

    async def ask(one: Served, url: str) -> None:
        async with of(url) as client, anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as other:
            for choice in ("required", named):
                await client.chat.completions.create(model="m", messages=ASK, tools=[TOOL], tool_choice=choice)
                assert '"{\\"name\\": \\"add\\"' in one.engine.received[-1][1].grammar
            await client.chat.completions.create(model="m", messages=ASK, response_format=schema)
            assert "%json" in one.engine.received[-1][1].grammar
            text: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
            await client.responses.create(model="m", input="hello", text=text)
            assert "%json" in one.engine.received[-1][1].grammar
            told: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": ASK}
            for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
                await other.messages.create(**told, tools=[tool], tool_choice=choice)
                assert "add" in one.engine.received[-1][1].grammar
            await other.messages.create(**told, output_config=form)
            assert "%json" in one.engine.received[-1][1].grammar
            with pytest.raises(openai.BadRequestError, match="tool_choice: expected one of the tools"):
                await client.chat.completions.create(
                    model="m",
                    messages=ASK,
                    tools=[TOOL],
                    tool_choice={"type": "function", "function": {"name": "sub"}},
                )

    run(ask, *["ok"] * 7, style="qwen2.5")


def test_an_answer_goes_on_from_what_the_client_began_and_is_found_again() -> None:
    async def ask(one: Served, url: str) -> None:
        async with of(url) as client, anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as other:
            begun: list[Any] = [*ASK, {"role": "assistant", "content": "The sum"}]
            message = await other.messages.create(model="m", max_tokens=50, messages=begun, stop_sequences=["!", "?"])
            prompt = one.engine.received[-1][0]
            assert one.engine.renderer.text(prompt).endswith("The sum")
            assert message.content[0].to_dict()["text"] == " is 7"
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "!")
            body = {"continue_final_message": True, "add_generation_prompt": False}
            chat = await client.chat.completions.create(model="m", messages=begun, extra_body=body)
            assert chat.choices[0].message.content == " is 7"
            whole: list[Any] = [
                *ASK,
                {"role": "assistant", "content": "The sum is 7"},
                {"role": "user", "content": "?"},
            ]
            await client.chat.completions.create(model="m", messages=whole)
            if "/s/" in url:  # the client's whole answer is the sampled one
                assert one.engine.received[-1][0][: len(prompt)] == prompt

    run(ask, " is 7! so", " is 7", "ok", style="qwen2.5")


def test_a_model_without_a_chat_template_continues_texts_and_says_what_a_chat_needs() -> None:
    from chat_templates import STYLES, tokenizer
    from shoal.model.chat_template import ChatRenderer

    made = tokenizer(STYLES["qwen2.5"])
    made.chat_template = None
    base = ChatRenderer(made, (made.eos_token_id,))

    async def ask(one: Served, url: str) -> None:
        async with of(url) as client:
            assert (await client.completions.create(model="m", prompt="3 + 4 =")).choices[0].text == "ok"
            for asked in (
                client.chat.completions.create(model="m", messages=ASK),
                client.responses.create(model="m", input="hello"),
            ):
                with pytest.raises(openai.BadRequestError, match="no chat template; send its text to /v1/completions"):
                    await asked

    run(ask, "ok", made=base)


def test_a_prompt_begins_as_the_model_s_own_tokenizer_begins_it() -> None:
    from tokenizers.processors import TemplateProcessing

    from chat_templates import STYLES, tokenizer
    from shoal.model.chat_template import ChatRenderer

    made = tokenizer(STYLES["gemma"])
    bos = made.convert_tokens_to_ids("<bos>")
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    own = ChatRenderer(made, (made.eos_token_id,))

    async def ask(one: Served, url: str) -> None:
        async with of(url) as client:
            for prompt in ("3 + 4 =", "<bos>3 + 4 ="):
                await client.completions.create(model="m", prompt=prompt)
                assert list(one.engine.received[-1][0]) == made("3 + 4 =").input_ids
                assert one.engine.received[-1][0].count(bos) == 1

    run(ask, "ok", "ok", made=own)


def test_a_model_is_found_by_its_name_and_both_clients_list_it() -> None:
    async def ask(one: Served, url: str) -> None:
        async with of(url) as client, anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as other:
            assert (await client.models.retrieve("m")).id == "m"
            with pytest.raises(openai.NotFoundError, match="GET /v1/models"):
                await client.models.retrieve("other")
            (listed,) = [model async for model in other.models.list()]
            found = await other.models.retrieve("m")
            assert (listed.id, found.display_name, found.type) == ("m", "m", "model")
            assert found.created_at.year >= 2024
            await client.completions.create(model="m", prompt="x")

    run(ask)


def test_an_unknown_field_is_named_in_a_sentence() -> None:
    async def ask(one: Served, url: str) -> None:
        if "/s/" in url:
            async with of(url) as client:
                await client.chat.completions.create(model="m", messages=ASK)
            return
        async with aiohttp.ClientSession() as http:
            for name, meant in (("temprature", "; 'temperature' may be meant"), ("qqqqq", "; leave it out")):
                async with http.post(f"{url}/v1/chat/completions", json={"messages": ASK, name: 1}) as answer:
                    error = (await answer.json())["error"]
                    assert error["message"] == f"{name}: this field is not known here{meant}"
                    assert error["param"] == name

    run(ask)


def test_server_tools_and_thoughts_are_asked_of_the_template_or_refused() -> None:
    async def ask(one: Served, url: str) -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as client:
            told: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": ASK}
            search: Any = {"type": "web_search_20250305", "name": "web_search"}
            with pytest.raises(anthropic.BadRequestError, match=r"tools.0..type: .* run it in the client"):
                await client.messages.create(**told, tools=[search])
            await client.messages.create(**told, thinking={"type": "enabled", "budget_tokens": 1024})
            with pytest.raises(anthropic.BadRequestError, match="thinking"):
                await client.messages.create(**told, thinking={"type": "other"})

    run(ask)


def test_anthropic_s_tool_runner_sends_whole_conversations_once_threads_are_refused() -> None:
    @anthropic.beta_async_tool
    async def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)

    async def ask(one: Served, url: str) -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as client:
            runner = client.beta.messages.tool_runner(model="m", max_tokens=99, messages=ASK, tools=[add])
            said = await runner.until_done()
            assert [block.text for block in said.content if block.type == "text"] == ["it is 7"]

    run(ask, '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>', "it is 7")


def test_an_answer_cut_by_max_tokens_is_no_stop() -> None:
    async def ask(one: Served, url: str) -> None:
        async with of(url) as client:
            answer = await client.responses.create(model="m", input="hello", max_output_tokens=3)
            assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
            assert one.engine.drawn[-1].finish_reason is FinishReason.LENGTH
            assert json.loads(answer.to_json())["output"][0]["status"] == "incomplete"

    run(ask, "a long answer")
