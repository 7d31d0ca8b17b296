"""Rows of imitation: turns end as the template ends them, and calls of tools are taught in its form."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_templates import ANSWERING, STYLES, renderer_of, tokenizer
from shoal.errors import TaskError
from shoal.run.commands.supervised import turns_of
from shoal.types import Sample

ALL = {**ANSWERING, **STYLES}
MADE = {name: (renderer_of(style), tokenizer(style)) for name, style in ALL.items()}
WORDS = st.text("abc 123", min_size=1, max_size=12).map(str.strip).filter(bool)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def taught(row: Sample) -> list[int]:
    return [token for token, m in zip(row.tokens, row.mask, strict=True) if m]


@pytest.mark.parametrize("name", ALL)
@given(asked=WORDS, said=WORDS)
def test_a_taught_turn_ends_with_the_token_that_the_template_shows_after_it(name: str, asked: str, said: str) -> None:
    """Templates that show none leave the tokenizer's own end."""
    renderer, its = MADE[name]
    said = f"answer {said}."
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    (row,) = turns_of(renderer, {"messages": messages}, "row")
    shown = its.apply_chat_template(messages, tokenize=False).rpartition(said)[2]
    stops = [(shown.find(stop), stop) for stop in ALL[name].stops if stop in shown]
    wanted = min(stops)[1] if stops else its.eos_token
    assert its.convert_ids_to_tokens(taught(row)[-1]) == wanted


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
@given(numbers=st.lists(st.integers(-99, 99), min_size=1, max_size=3))
def test_calls_of_tools_are_taught_as_the_template_writes_them(name: str, numbers: list[int]) -> None:
    renderer, its = MADE[name]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"numbers": numbers})}}
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(sum(numbers)), "tool_call_id": "1"},
        {"role": "assistant", "content": f"It is {sum(numbers)}."},
    ]
    calling, answering = turns_of(renderer, {"messages": messages, "tools": TOOLS}, "row")
    (found,) = renderer.answer(taught(calling), tools=True).calls
    assert (found.name, json.loads(found.arguments)) == ("add", {"numbers": numbers})
    assert its.decode(calling.tokens).count("<tool_call>") == 2  # the head's example, and the call
    assert its.decode(taught(answering)) == f"It is {sum(numbers)}.<|im_end|>"


def test_calls_that_a_template_cannot_show_and_tools_that_are_none_are_refused() -> None:
    renderer, _ = MADE["gemma"]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(TaskError, match=r"row: expected an answer that the model's template .* calls of 'add'"):
        turns_of(renderer, {"messages": messages}, "row")
    with pytest.raises(TaskError, match="row: tools: expected a list of tables"):
        turns_of(renderer, {"messages": messages, "tools": "add"}, "row")
