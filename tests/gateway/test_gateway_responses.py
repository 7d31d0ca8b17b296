"""`/v1/responses` with OpenAI's real client, before a scripted engine."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from gateway_engine import Served, served
from shoal.trainer.advantage import rows
from shoal.types import Reward, Rollout

TOOL: Any = {"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object"}}
TWO_CALLS = (
    '<tool_call>{"name": "add", "arguments": {"x": 3}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"x": 4}}</tool_call>'
)


def run(scenario: Callable[[Served, openai.AsyncOpenAI], Awaitable[None]], *script: str, **options: Any) -> None:
    async def main() -> None:
        async with served(*script, is_open=True, **options) as one:
            session = one.gateway.sessions.open()
            async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key=session.token, max_retries=0) as client:
                await scenario(one, client)
                one.gateway.sessions.get(session.token)
                if one.engine.drawn:
                    check_one_row(one, session.token)

    asyncio.run(main())


def check_one_row(one: Served, token: str) -> None:
    """All that was drawn is in one row, where the engine drew it."""
    session = one.gateway.sessions.get(token)
    assert session is not None
    (row,) = rows(Rollout("r", (), session.tree.turns(), Reward(1.0)), 1.0)
    assert sum(row.mask) == sum(len(completion.token_ids) for completion in one.engine.drawn)
    for (prompt, _), completion in zip(one.engine.received, one.engine.drawn, strict=True):
        whole = prompt + completion.token_ids
        assert row.tokens[: len(whole)] == whole


def results(output: Any) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "7"}
        for item in output
        if item.type == "function_call"
    ]


def test_items_that_come_back_are_one_conversation() -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": "m", "instructions": "be brief", "tools": [TOOL]}
        said: list[Any] = [{"role": "user", "content": "what is 3 + 4?"}]
        first = await client.responses.create(input=said, **asked)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert [json.loads(i.arguments) for i in first.output if i.type == "function_call"] == [{"x": 3}, {"x": 4}]
        said += [item.model_dump(exclude_none=True) for item in first.output] + results(first.output)
        second = await client.responses.create(input=said, **asked)
        assert (second.status, second.output_text) == ("completed", "seven")
        assert second.usage is not None
        assert second.usage.input_tokens == len(one.engine.received[1][0])
        said += [*second.output, {"role": "user", "content": [{"type": "input_text", "text": "thanks"}]}]
        await client.responses.create(input=said, **asked)

    run(scenario, f"<think>\nhm\n</think>\n\nlet me see {TWO_CALLS}", "<think>\nso\n</think>\n\nseven", "bye")


def test_a_response_goes_on_from_the_one_it_names() -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": "m", "tools": [TOOL], "instructions": "be brief"}
        first = await client.responses.create(input="what is 3 + 4?", **asked)
        second = await client.responses.create(input=results(first.output), previous_response_id=first.id, **asked)
        await client.responses.create(input="thanks", previous_response_id=second.id, model="m", tools=[TOOL])
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(input="x", previous_response_id="resp_99", model="m")

    run(scenario, TWO_CALLS, "seven", "bye")


def test_a_stream_of_events_makes_the_same_response() -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        async with client.responses.stream(model="m", input="3 + 4?", tools=[TOOL]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
        kinds = {event.type for event in events}
        assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
        assert {"response.function_call_arguments.done", "response.output_item.done"} <= kinds
        assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "let me see"
        said: list[Any] = [{"role": "user", "content": "3 + 4?"}, *final.to_dict()["output"], *results(final.output)]  # type: ignore[misc]
        raw = await client.responses.create(model="m", input=said, tools=[TOOL], stream=True)
        *_, last = [event async for event in raw]
        assert last.type == "response.incomplete"
        assert last.response.incomplete_details is not None

    run(scenario, f"let me see {TWO_CALLS}", "sev…", delay_s=0.1, keep_alive_s=0.03)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text", {"format": {"type": "grammar"}}),
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "name": "add"}),
        ("truncation", "auto"),
        ("background", True),
        ("max_output_tokens", 0),
        ("previous_response_id", "chatcmpl-1"),
        ("conversation", "conv_1"),
        ("input", []),
        ("input", [{"type": "computer_call_output"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(field: str, value: object) -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="max_tokens" if field == "max_output_tokens" else field):
            await client.responses.create(**{"model": "m", "input": "hello", field: value})  # type: ignore[call-overload]
        assert one.engine.received == []

    run(scenario)


def test_text_is_the_one_format() -> None:
    async def scenario(one: Served, client: openai.AsyncOpenAI) -> None:
        answer = await client.responses.create(model="m", input="hello", text={"format": {"type": "text"}})
        assert answer.output_text == "ok"

    run(scenario)
