"""Grammars of answers: a JSON Schema, or calls of tools in the form of the model's template. Pure.

The text is in llguidance's Lark syntax. A thought before the answer is unconstrained.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.errors import SessionError
from shoal.model.tool_calls import CallFormat
from shoal.types import Json

if TYPE_CHECKING:
    from shoal.model.chat_template import ChatRenderer

SPACE = "SPACE: /[ \\n]{0,4}/"
BLANKS: dict[str, Json] = {"x-guidance": {"whitespace_pattern": "[ \\t\\r\\n]{0,32}"}}
"""llguidance's bound on the blanks between two parts of JSON; without one a weak model fills its answer with them."""


def answer_grammar(
    renderer: "ChatRenderer", schema: str, wanted: Sequence[str], tools: str, template: str, *, one_call: bool
) -> str:
    """Grammar of an answer that satisfies a schema or calls one of the `wanted` tools; empty for any answer.

    Raises `SessionError` for a call format without a grammar.
    """
    if not schema and not wanted:
        return ""
    rules = _calls(renderer, wanted, tools, one_call) if wanted else [f"answer: {_json(json.loads(schema))}"]
    return "\n".join([*_start(renderer, template), *rules, SPACE])


def _start(renderer: "ChatRenderer", template: str) -> list[str]:
    """Rules of an answer with the thought before it."""
    if not renderer.parts_thoughts(template) or renderer.in_channels:
        return ["start: answer"]
    opened, closed = renderer.thought_marks
    if renderer.is_special(closed):
        thought = f"thought: /(?s:.*)/ {_mark(renderer, closed)}"
    else:
        thought = f"thought[suffix={json.dumps(closed)}]: /(?s:.*)/"
    if renderer.opens_thought(template):
        return ["start: thought SPACE answer", thought]
    return [f"start: ({_mark(renderer, opened)} thought SPACE)? answer", thought]


def _mark(renderer: "ChatRenderer", text: str) -> str:
    """A mark of the template: a special token by its id, or else its text."""
    return f"<[{renderer.token_id(text)}]>" if renderer.is_special(text) else json.dumps(text)


def _calls(renderer: "ChatRenderer", wanted: Sequence[str], tools: str, one_call: bool) -> list[str]:
    """Rules of an answer that consists of calls."""
    functions = [tool["function"] for tool in json.loads(tools) if tool["function"]["name"] in wanted]
    listed = renderer.call_format is CallFormat.LISTED
    many = "" if one_call else ' (", " call)*' if listed and not renderer.names_calls else " (SPACE call)*"
    names = " | ".join(f"call{i}" for i in range(len(functions)))
    shape, each = _shape(renderer, f"({names})"), []
    for i, function in enumerate(functions):
        each += _call(renderer, i, function["name"], function.get("parameters") or {})
    if listed and not renderer.names_calls:
        mark = _mark(renderer, "[TOOL_CALLS]")
        return [f'answer: {mark} SPACE "[" call{many} "]"', f"call: {names}", *each]
    return [f"answer: call{many}", f"call: {shape}", *each]


def _shape(renderer: "ChatRenderer", inner: str) -> str:
    """One call with its marks around its name and arguments."""
    match renderer.call_format:
        case CallFormat.TAGGED_JSON | CallFormat.TAGGED_PAIRS:
            opened, closed = _mark(renderer, "<tool_call>"), _mark(renderer, "</tool_call>")
            return f"{opened} SPACE {inner} SPACE {closed}"
        case CallFormat.LISTED:
            return f"{_mark(renderer, '[TOOL_CALLS]')} {inner}"
        case CallFormat.BARE_JSON:
            return inner
    raise SessionError("tool_choice: expected 'auto' or 'none', the model's chat template shows no tools")


def _call(renderer: "ChatRenderer", i: int, name: str, parameters: dict[str, Json]) -> list[str]:
    """Rules `call{i}` of the name and arguments of one tool."""
    arguments = f"arguments{i}: {_json(parameters if parameters.get('type') == 'object' else {'type': 'object'})}"
    match renderer.call_format:
        case CallFormat.TAGGED_PAIRS:
            return _pairs(renderer, i, name, parameters)
        case CallFormat.LISTED if renderer.names_calls:
            return [f"call{i}: {json.dumps(name)} {_mark(renderer, '[ARGS]')} arguments{i}", arguments]
    key = "parameters" if renderer.call_format is CallFormat.BARE_JSON else "arguments"
    head = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')
    return [f'call{i}: {head} arguments{i} "}}"', arguments]


def _pairs(renderer: "ChatRenderer", i: int, name: str, parameters: dict[str, Json]) -> list[str]:
    """Rules of a call whose arguments are pairs of key and value; strings are written without quotes."""
    properties, required = parameters.get("properties"), parameters.get("required")
    properties = properties if isinstance(properties, dict) else {}
    shared: dict[str, Json] = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    parts, rules = [json.dumps(name)], list[str]()
    key_end, value, value_end = (_mark(renderer, mark) for mark in ("</arg_key>", "<arg_value>", "</arg_value>"))
    for j, (key, schema) in enumerate(properties.items()):
        is_text = isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema
        pair = (
            f"SPACE {_mark(renderer, '<arg_key>')} {json.dumps(key)} {key_end} SPACE {value} value{i}_{j} {value_end}"
        )
        parts.append(pair if isinstance(required, list) and key in required else f"({pair})?")
        whole = {**schema, **shared} if isinstance(schema, dict) else shared
        rules.append(f"value{i}_{j}: " + (r"/[^<]*/" if is_text else _json(whole)))
    return [f"call{i}: {' '.join(parts)}", *rules]


def _json(schema: dict[str, Json]) -> str:
    """JSON that satisfies a schema."""
    return f"%json {json.dumps({**BLANKS, **schema})}"
