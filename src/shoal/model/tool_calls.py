"""Tool calls in sampled text, in the formats of the families of chat templates. Pure.

The parser never repairs text: an ill-formed call stays text, and the answer is flagged.
"""

import json
import re
from dataclasses import dataclass
from enum import StrEnum

from shoal.types import Json

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# Possessive quantifiers refuse text that does not match in linear time.
_NAMED = re.compile(r"\s*+([\w.-]++)\[ARGS\]\s*+")
_BETWEEN = re.compile(r"[; \n]*+")
_decoder = json.JSONDecoder()
ILL_FORMED = (ValueError, RecursionError)
"""Errors of malformed calls."""


class CallFormat(StrEnum):
    """Formats of tool calls in a template."""

    NONE = "none"
    """The template has no tools."""
    TAGGED_JSON = "tagged_json"
    """Tags around JSON, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen 2.5 and 3."""
    TAGGED_PAIRS = "tagged_pairs"
    """Tag `<tool_call>name` and an `<arg_key>`, `<arg_value>` pair per argument, as GLM 4.5."""
    BARE_JSON = "bare_json"
    """Whole answer of the form `{"name": ..., "parameters": {...}}`, as Llama 3."""
    LISTED = "listed"
    """Mark `[TOOL_CALLS]` and a JSON list of calls, or `name[ARGS]{...}`, as Mistral."""


@dataclass(frozen=True, slots=True)
class SampledCall:
    """Call as it was sampled; `arguments` is a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TextAndCalls:
    """Text outside well-formed calls, and the calls in order."""

    content: str
    calls: tuple[SampledCall, ...] = ()
    ill_formed: bool = False


def call_format(template: str | None) -> CallFormat:
    """Call format of a template, found in its text."""
    if template is None or "tools" not in template:
        return CallFormat.NONE
    if "<arg_key>" in template:
        return CallFormat.TAGGED_PAIRS
    if "<tool_call>" in template:
        return CallFormat.TAGGED_JSON
    if "[TOOL_CALLS]" in template:
        return CallFormat.LISTED
    return CallFormat.BARE_JSON if '"parameters"' in template else CallFormat.NONE


def split_calls(text: str, form: CallFormat) -> TextAndCalls:
    """Splits a sampled text into text and calls.

    >>> split_calls('so <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', CallFormat.TAGGED_JSON).calls
    (SampledCall(name='f', arguments='{"x": 1}'),)
    >>> split_calls("<tool_call>{oops</tool_call>", CallFormat.TAGGED_JSON)
    TextAndCalls(content='<tool_call>{oops</tool_call>', calls=(), ill_formed=True)
    """
    match form:
        case CallFormat.NONE:
            return TextAndCalls(text)
        case CallFormat.BARE_JSON:
            return _bare(text)
        case CallFormat.LISTED:
            return _listed(text)
        case CallFormat.TAGGED_JSON | CallFormat.TAGGED_PAIRS:
            return _tagged(text, form)


def _tagged(text: str, form: CallFormat) -> TextAndCalls:
    read = _from_json if form is CallFormat.TAGGED_JSON else _from_pairs
    calls: list[SampledCall] = []
    parts: list[str] = []
    end = 0
    while (start := text.find(_OPEN, end)) >= 0 and (close := text.find(_CLOSE, start)) >= 0:
        before, end = end, close + len(_CLOSE)
        try:
            calls.append(read(text[start + len(_OPEN) : close]))
            parts.append(text[before:start])
        except ILL_FORMED:
            parts.append(text[before:end])
    content = "".join([*parts, text[end:]])
    ill_formed = _OPEN in content or _CLOSE in content
    return TextAndCalls(content.rstrip() if calls else content, tuple(calls), ill_formed)


def _from_json(text: str) -> SampledCall:
    return _call(json.loads(text))


def _from_pairs(text: str) -> SampledCall:
    name, *pairs = text.split("<arg_key>")
    name, arguments = name.strip(), {}
    for pair in pairs:
        key, closed, rest = pair.partition("</arg_key>")
        opened, mark, value = rest.partition("<arg_value>")
        value, ended, behind = value.partition("</arg_value>")
        if not (closed and mark and ended) or opened.strip() or behind.strip():
            raise ValueError("expected <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")
        arguments[key] = _value(value)
    if not name or any(c.isspace() for c in name):
        raise ValueError("expected a name")
    return _sampled_call(name, arguments)


def _value(text: str) -> Json:
    try:
        value: Json = json.loads(text)
    except ILL_FORMED:
        return text
    return value


def _bare(text: str) -> TextAndCalls:
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return TextAndCalls(text, ill_formed="<|python_tag|>" in text)
    calls: list[SampledCall] = []
    at = 0
    try:
        while at < len(body):
            value, at = _decoder.raw_decode(body, at)
            calls.append(_call(value))
            between = _BETWEEN.match(body, at)
            assert between is not None
            at = between.end()
    except ILL_FORMED:
        return TextAndCalls(text, ill_formed='"name"' in body)
    return TextAndCalls("", tuple(calls))


def _listed(text: str) -> TextAndCalls:
    content, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return TextAndCalls(text)
    try:
        if _NAMED.match(rest):
            calls = _named(rest)
        else:
            value = json.loads(rest)
            calls = [_call(one) for one in value] if isinstance(value, list) else []
    except ILL_FORMED:
        calls = []
    return TextAndCalls(content.rstrip(), tuple(calls)) if calls else TextAndCalls(text, ill_formed=True)


def _named(text: str) -> list[SampledCall]:
    """Calls of the form `name[ARGS]{...}`, repeated. Raises ValueError for any other text."""
    calls: list[SampledCall] = []
    text = text.replace("[TOOL_CALLS]", "").rstrip()
    at = 0
    while at < len(text):
        match = _NAMED.match(text, at)
        if match is None:
            raise ValueError("expected name[ARGS]")
        value, at = _decoder.raw_decode(text, match.end())
        calls.append(_call({"name": match[1], "arguments": value}))
    return calls


def _call(value: Json) -> SampledCall:
    """Call from `{"name": ..., "arguments" or "parameters": {...}}`. Raises `ValueError` for any other value."""
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("expected a name and arguments")
    return _sampled_call(name, arguments)


def _sampled_call(name: str, arguments: dict[str, Json]) -> SampledCall:
    """Call with its arguments as JSON.

    Raises `ValueError` for half a surrogate pair, which JSON can spell but nothing can encode.
    """
    text = json.dumps(arguments, ensure_ascii=False)
    (name + text).encode()
    return SampledCall(name, text)
