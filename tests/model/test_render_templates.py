"""Chat templates: what follows a drawn answer, and the calls within one."""

import json
from dataclasses import replace

import pytest

from chat_templates import ANSWERING, STYLES, renderer, renderer_of
from shoal.errors import SessionError
from shoal.types import Message, Role, ToolCall

ASK = Message(Role.USER, "what is 3 + 4?")
ANSWER = Message(Role.ASSISTANT, "the answer is 7")
NEXT = Message(Role.USER, "and 12?")
CALL = ToolCall("abc123def", "add", '{"x": 3, "y": 4}')
CALLING = Message(Role.ASSISTANT, "", (CALL,))
RESULT = Message(Role.TOOL, "7", tool_call_id="abc123def")
TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
WITH_TOOLS = [name for name in STYLES if name != "gemma"]
STYLED = list(STYLES)


@pytest.mark.parametrize("name", STYLED)
def test_a_prompt_bridged_after_the_template_s_own_answer_is_the_rendered_conversation(name: str) -> None:
    made = renderer(name)
    whole = made.prompt_ids([ASK, ANSWER, NEXT])
    bridge = made.bridge_ids([NEXT])
    assert bridge is not None
    assert whole[-len(bridge) :] == bridge
    assert bridge[0] in made.stop_token_ids


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tool_results_are_bridged_as_they_are_rendered(name: str) -> None:
    made = renderer(name)
    whole = made.prompt_ids([ASK, CALLING, RESULT], TOOLS)
    bridge = made.bridge_ids([RESULT], TOOLS)
    assert bridge is not None
    assert whole[-len(bridge) :] == bridge


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_call_is_read_as_its_template_writes_it(name: str) -> None:
    made = renderer(name)
    before = made.prompt_ids([ASK], TOOLS) if name != "mistral" else made.prompt_ids([ASK])
    drawn = made.prompt_ids([ASK, CALLING, RESULT], TOOLS if name != "mistral" else "")[len(before) :]
    end = next(i for i, token in enumerate(drawn) if token in made.stop_token_ids)
    answer = made.answer(drawn[: end + 1], tools=True)
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("add", {"x": 3, "y": 4})]
    assert (answer.content.strip(), answer.ill_formed) == ("", False)


MALFORMED = {
    "qwen2.5": '<tool_call>{"name": "add", </tool_call>',
    "qwen3": "<tool_call>[]</tool_call>",
    "llama3": '{"name": "add", "parameters": 3}',
    "mistral": '[TOOL_CALLS][{"name": 3}]',
    "glm": "<tool_call>add<arg_key>x</arg_key></tool_call>",
}
HALF_A_PAIR = {
    "qwen2.5": '<tool_call>{"name": "add", "arguments": {"x": "\\ud83d"}}</tool_call>',
    "qwen3": '<tool_call>{"name": "\\ud83d"}</tool_call>',
    "llama3": '{"name": "add", "parameters": {"\\ud83d": 3}}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"x": "\\ud83d"}',
    "glm": '<tool_call>add<arg_key>x</arg_key><arg_value>"\\ud83d"</arg_value></tool_call>',
}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_malformed_call_stays_text_and_is_flagged(name: str) -> None:
    made = renderer(name)
    for drawn in (MALFORMED[name], HALF_A_PAIR[name]):
        answer = made.answer(made.token_ids(drawn), tools=True)
        assert (answer.content, answer.calls, answer.ill_formed) == (drawn, (), True)


def test_parallel_calls_are_all_kept_and_text_without_tools_is_left_alone() -> None:
    made = renderer("qwen2.5")
    text = 'first <tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    answer = made.answer(made.token_ids(text), tools=True)
    assert (answer.content, [call.name for call in answer.calls]) == ("first", ["a", "b"])
    assert made.answer(made.token_ids(text), tools=False).content == text


def test_mistral_s_newer_calls_are_read() -> None:
    made = renderer("mistral")
    answer = made.answer(made.token_ids('[TOOL_CALLS]add[ARGS]{"x": 1}[TOOL_CALLS]sub[ARGS]{}'), tools=True)
    assert [(call.name, call.arguments) for call in answer.calls] == [("add", '{"x": 1}'), ("sub", "{}")]


@pytest.mark.parametrize(
    ("drawn", "reasoning", "content"),
    [
        ("<think>\nso 7\n</think>\n\nthe answer", "so 7", "the answer"),
        ("<think>\ncut short", "cut short", ""),
        ("the answer", "", "the answer"),
    ],
)
def test_thoughts_are_set_apart(drawn: str, reasoning: str, content: str) -> None:
    made = renderer("qwen3")
    answer = made.answer(made.token_ids(drawn), tools=False)
    assert (answer.reasoning, answer.content) == (reasoning, content)


def test_whether_a_thought_is_open_depends_on_the_template_s_arguments() -> None:
    opens = "assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
    template = STYLES["qwen3"].template.replace("assistant\n{% endif %}", opens + "{% endif %}")
    made = renderer_of(replace(STYLES["qwen3"], template=template))
    drawn = made.token_ids("it is 7")
    assert made.answer(drawn, tools=False).reasoning == "it is 7"
    assert made.answer(drawn, tools=False, template='{"enable_thinking": false}').content == "it is 7"


def test_an_answer_that_goes_on_is_a_thought_for_as_long_as_its_thought_is_open() -> None:
    thinking, answering = (
        Message(Role.ASSISTANT, "", reasoning="3 and"),
        Message(Role.ASSISTANT, "It is", reasoning="3"),
    )
    channel = "<|end|><|start|>assistant<|channel|>final<|message|>"
    for name, end in (("deepseek-r1", "</think>\n\n"), ("qwen3", "</think>\n\n"), ("gpt-oss", channel)):
        made = renderer_of(ANSWERING[name])
        for drawn, after, expected in (
            ("4 are", thinking, ("4 are", "")),
            (f"4 are{end}7", thinking, ("4 are", "7")),
            ("7", answering, ("", "7")),
        ):
            said = made.answer(made.token_ids(drawn), tools=False, after=after)
            assert (said.reasoning, said.content) == expected


def test_where_the_new_message_changes_what_came_before_there_is_no_bridge() -> None:
    gemma = STYLES["gemma"]
    counting = replace(gemma, template="{{ messages | length }} messages" + gemma.template)
    assert renderer_of(counting).bridge_ids([NEXT]) is None
    assert renderer_of(gemma).bridge_ids([NEXT]) is not None
    assert renderer_of(replace(gemma, stops=("<eos>",))).bridge_ids([NEXT]) is None  # no token closes an answer


def test_messages_that_the_template_refuses_are_refused_with_its_words() -> None:
    with pytest.raises(SessionError, match="roles must alternate"):
        renderer("gemma").prompt_ids([ASK, NEXT])
    assert renderer("gemma").bridge_ids([NEXT, NEXT]) is None


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_call_with_half_a_surrogate_pair_is_unreadable_and_no_exception(name: str) -> None:
    """Peers may offer it, and no tokenizer reads it."""
    made = renderer(name)
    torn = replace(CALLING, tool_calls=(replace(CALL, arguments=r'{"x": "\ud800"}'),))
    assert made.message_ids(torn, [ASK], TOOLS, made.prompt_ids([ASK], TOOLS)) is None
    assert made.bridge_ids([NEXT, torn, RESULT], TOOLS) is None
