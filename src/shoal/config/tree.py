"""Trees of plain values, as TOML has them: copied, checked, and found by dotted names."""

from collections.abc import Callable
from math import isfinite
from typing import Any

from pydantic import JsonValue

from shoal.errors import ConfigError

MOST_LEVELS = 32
"""Number of levels of tables and lists within each other."""


def mapped(tree: JsonValue, change: Callable[[str, JsonValue], JsonValue], where: str = "") -> Any:
    """A copy with each value that is not a table or list replaced by `change(place, value)`.

    Raises `ConfigError` for a tree that is nested too deeply.
    """
    if where.count(".") > MOST_LEVELS:
        raise ConfigError(f"{where.split('.')[1]} is nested too deeply: expected at most {MOST_LEVELS} levels")
    if isinstance(tree, dict):
        return {key: mapped(value, change, f"{where}.{key}") for key, value in tree.items()}
    if isinstance(tree, list):
        return [mapped(value, change, f"{where}.{index}") for index, value in enumerate(tree)]
    return change(where, tree)


def checked(tree: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """A copy of the tree. Raises `ConfigError` for values that no setting may have, wherever they stand."""
    copy: dict[str, JsonValue] = mapped(tree, _checked)
    return copy


def _checked(where: str, value: JsonValue) -> JsonValue:
    expected, got = "", f"{value!r}"
    if isinstance(value, float) and not isfinite(value):
        expected = "a finite number"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        expected, got = "a number of at most 64 bits", f"one of {value.bit_length()}"
    elif isinstance(value, str) and ("\0" in value or value.encode(errors="replace").decode() != value):
        expected = "text in UTF-8 without NUL"  # other bytes were decoded to surrogates
    elif not isinstance(value, str | int | float | bool | None):
        expected, got = "text or a number", f"the {type(value).__name__} {value}"
    if expected:
        raise ConfigError(f"{where[1:]}: expected {expected}, got {got}")
    return value


def place_of(key: str, tree: dict[str, JsonValue]) -> tuple[Any, Any]:
    """The table or list that a dotted name leads to, with the key or index there; creates missing tables.

    Raises `ConfigError` where the name leads into a value or past the end of a list.
    """
    node: Any = {"": tree}
    at: Any = ""
    for part in key.split("."):
        node = node[at] if isinstance(node, list) else node.setdefault(at, {})
        if not isinstance(node, list | dict):
            raise ConfigError(f"{key}: {at!r} is a value, not a section")
        if isinstance(node, list) and not (part.isdecimal() and int(part) < len(node)):
            raise ConfigError(f"{key}: expected an index below {len(node)}, got {part!r}")
        at = int(part) if isinstance(node, list) else part
    return node, at
