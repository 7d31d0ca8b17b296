"""Complaints about settings: what pydantic finds wrong, in Shoal's words."""

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shoal.config.section import Section
from shoal.config.training import LOSSES
from shoal.errors import did_you_mean, expected_one_of

NEEDED = {
    "tasks": 'at least one table, such as [[tasks]] with name = "chain_sum" below it',
}
"""Expected values of settings without a default whose description does not state them."""
WHOLE, NUMBER, TRUTH = "a whole number", "a number", "true or false"
LIST, TABLE, TEXT = "a list", "a table", "text"
KINDS = {
    "int_type": WHOLE, "int_parsing": WHOLE, "int_from_float": WHOLE, "int_parsing_size": WHOLE,
    "float_type": NUMBER, "float_parsing": NUMBER, "bool_type": TRUTH, "bool_parsing": TRUTH,
    "list_type": LIST, "tuple_type": LIST, "dict_type": TABLE, "model_type": TABLE, "model_attributes_type": TABLE,
    "string_type": TEXT, "greater_than_equal": "at least {ge}", "less_than_equal": "at most {le}",
    "greater_than": "more than {gt}", "less_than": "less than {lt}", "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries", "string_pattern_mismatch": "module:function or file.py:function",
}  # fmt: skip
"""Expectations by pydantic's types of errors."""
CHOICES = {"literal_error": "expected", "union_tag_invalid": "expected_tags"}
"""Where pydantic's errors about names list the right ones."""


def complaint(error: ValidationError, tree: object, root: type[Section]) -> str:
    """Builds the sentence about the first error in a tree of settings; it begins with the setting's name."""
    errors = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")  # a misspelled one is missing too
    first, named = errors[0], _named(errors[0], tree)
    where = ".".join(named)
    if first["type"] == "extra_forbidden":
        siblings = _section_at(root, [str(part) for part in first["loc"][:-1]]).model_fields
        hint = did_you_mean(named[-1], siblings, lambda name: repr(".".join([*named[:-1], name])))
        return f"{where}: unknown setting{hint or '; docs/reference/configuration.md lists the settings'}"
    if first["type"] == "value_error":
        return ".".join([*named, str(first["ctx"]["error"])])
    if first["type"] == "missing":
        return f"{where}: expected {_needed(root, where, first)}, got none"
    if where in NEEDED and first["type"] == "too_short":
        return f"{where}: expected {NEEDED[where]}, got none"
    return f"{where}: {expectation([one for one in errors if _named(one, tree) == named])}"


def expectation(errors: Sequence[ErrorDetails]) -> str:
    """Says what was expected of one value, each kind that it may have, and what came.

    >>> expectation([{"type": "int_type", "loc": (), "msg": "", "input": "x", "ctx": {}}])
    "expected a whole number, got 'x'"
    """
    known = [name for one in errors for name in _choices(one)]
    kinds = dict.fromkeys(_kind(one) for one in errors if one["type"] not in CHOICES)
    given = errors[0]["input"]
    if isinstance(given, dict) and errors[0]["type"] == "union_tag_invalid":
        given = given["name"]
    if known and isinstance(given, str):
        return expected_one_of(known, given, "".join(f" or {kind}" for kind in kinds))
    got = repr(given)
    expected = " or ".join([*([f"one of {', '.join(known)}"] if known else []), *kinds])
    return f"expected {expected}, got {got if len(got) <= 80 else f'{got[:77]}...'}"


def _choices(error: ErrorDetails) -> list[str]:
    """Names that one error lists as the right ones."""
    listed = CHOICES.get(error["type"])
    return re.findall(r"'([^']*)'", str(error["ctx"][listed])) if listed else []


def _kind(error: ErrorDetails) -> str:
    form = KINDS.get(error["type"], "a value as docs/reference/configuration.md has it")
    bounds = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in error.get("ctx", {}).items()
    }
    return form.format(**bounds).replace("at least 1 entries", "at least one entry")


def _needed(root: type[Section], where: str, error: ErrorDetails) -> str:
    """Describes a setting whose value is missing."""
    *path, name = [str(part) for part in error["loc"]]
    if where in NEEDED:
        return NEEDED[where]
    field = _section_at(root, path).model_fields.get(name)
    return f"a value ({field.description.rstrip('.')})" if field and field.description else "one more entry"


def _named(error: ErrorDetails, tree: object) -> list[str]:
    """Path of the setting: pydantic also says which kind of loss or value it tried."""
    path: list[str] = []
    node = tree
    for part in error["loc"]:
        if isinstance(node, dict) and part in node:
            node = node[str(part)]
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        path.append(str(part))
    return path


def _section_at(root: type[Section], path: Sequence[str]) -> type[Section]:
    """Section that a path leads to; parts that are not sections are skipped."""
    section = root
    for part in path:
        inner: Mapping[str, type[Section]] = {**LOSSES, **dict(_sections(section))}
        section = inner.get(part, section)
    return section


def _sections(section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """Sections within a section by name, those of lists and of settings that may be unset too."""
    for name, field in section.model_fields.items():
        kinds = [field.annotation]
        if get_origin(field.annotation) in (list, Union, types.UnionType):
            kinds = list(get_args(field.annotation))
        found: list[Any] = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        if len(found) == 1:
            yield name, found[0]
