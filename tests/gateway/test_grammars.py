"""Grammars of answers, in each form of a call: which texts they take."""

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


def test_an_answer_under_a_schema_is_laid_out_as_the_model_likes_and_is_not_filled_with_blanks(tmp_path: Path) -> None:
    made, own = renderer("qwen2.5"), tokenizer(STYLES["qwen2.5"])
    own.save_pretrained(tmp_path)
    grammar = answer_grammar(made, json.dumps(SCHEMA), (), "", "", one_call=False)
    matcher = Grammars(tmp_path, len(own)).matcher(grammar, made.stop_token_ids)
    for text, passes in (('{"x":3}', True), ('{\n\t"x": 3\n}', True), ("{" + 40 * "\n" + '"x":3}', False)):
        tokens = made.token_ids(text)
        assert (matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)) == passes, text


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
