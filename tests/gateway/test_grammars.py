"""Answers under a grammar from a real engine: what it samples, logs, and leaves out of training."""

import json
from pathlib import Path

import pytest

from chat_templates import STYLES, renderer, tokenizer
from shoal.engine.compute.logit_rules import Grammars
from shoal.gateway.grammars import answer_grammar

SCHEMA = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/I"}},
    "required": ["x"],
    "$defs": {"I": {"type": "integer"}},
    "additionalProperties": False,
}
TOOLS = json.dumps([{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")])
CALLS = {
    "qwen2.5": '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>',
    "qwen3": '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>',
    "llama3": '{"name": "f", "parameters": {"x": 3}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"x": 3}}]',
    "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("style", CALLS)
@pytest.mark.parametrize("one_call", [False, True])
def test_a_forced_call_has_the_form_of_the_template_and_nothing_else_passes(
    style: str, one_call: bool, tmp_path: Path
) -> None:
    made, own = renderer(style), tokenizer(STYLES[style])
    own.save_pretrained(tmp_path)
    grammars = Grammars(tmp_path, len(own))

    def read(text: str) -> int:
        """Number of tokens that the grammar takes of a text."""
        grammar = answer_grammar(made, "", ("f",), TOOLS, "", one_call=one_call)
        return grammars.matcher(grammar, made.stop_token_ids).try_consume_tokens(made.token_ids(text))

    call = CALLS[style]
    assert made.answer(made.token_ids(call), tools=True).calls[0].arguments == '{"x": 3}'
    assert read(call) == len(made.token_ids(call))
    for wrong in ("seven", call.replace("3", '"a"'), call.replace("f", "h", 1).replace('f"', 'g"')):
        assert read(wrong) < len(made.token_ids(wrong))
