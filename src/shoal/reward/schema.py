"""JSON Schema (2020-12) by the jsonschema library, made linear in the text of an answer.

RE2 matches the patterns, items are compared by hash instead of in pairs, and no reference is fetched.
"""

import json
import re
from collections.abc import Callable, Iterator

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from shoal.checker import compiled

_BLOCK = re.compile(r"```[^\S\n]*+(?:json)?+[^\S\n]*+\n(.*?)```", re.DOTALL)
MOST_WORDS = 200
"""Characters of a complaint; the library quotes the whole value."""


def json_in(answer: str) -> object:
    """The JSON value of an answer: all of it, or its last fenced block. Raises `ValueError`.

    >>> json_in('Here: ```json\\n{"a": 1}\\n```'), json_in("[1]")
    ({'a': 1}, [1])
    """
    blocks: list[str] = _BLOCK.findall(answer)
    return json.loads(blocks[-1] if blocks else answer)


def complaint_of(schema: object) -> Callable[[object], str]:
    """A function that says where and why a schema refuses a value; empty for a valid value.

    Raises `ValueError` for a schema that cannot be used.

    >>> complaint = complaint_of({"properties": {"a": {"type": "integer"}}, "required": ["a"]})
    >>> complaint({"a": "x"}), complaint({"a": 1})
    ("$.a: 'x' is not of type 'integer'", '')
    """
    try:
        _Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"schema: {error.message[:MOST_WORDS]}") from None
    registry = Registry().with_resource("", DRAFT202012.create_resource(schema))
    for keyword, argument in _keywords(schema):
        if keyword == "patternProperties":
            raise ValueError("schema: patternProperties is not supported")
        if keyword == "pattern" and isinstance(argument, str):
            compiled(argument)
        if keyword == "$ref" and isinstance(argument, str):
            try:
                registry.resolver().lookup(argument)
            except Unresolvable:
                raise ValueError(f"schema: $ref: expected one within the schema, got {argument!r}") from None
    validator = _Validator(schema, registry=registry)

    def complaint(value: object) -> str:
        error = next(validator.iter_errors(value), None)
        return f"{error.json_path}: {error.message[:MOST_WORDS]}" if error else ""

    return complaint


def _keywords(schema: object) -> Iterator[tuple[str, object]]:
    """Every key of a schema and of its parts, with the names of properties."""
    pending = [schema]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            yield from one.items()
            pending += one.values()
        elif isinstance(one, list):
            pending += one


def _pattern(_: object, pattern: str, value: object, __: object) -> Iterator[ValidationError]:
    if isinstance(value, str) and compiled(pattern).search(value) is None:
        yield ValidationError(f"expected text that matches {pattern}")


def _unique(_: object, wanted: bool, value: object, __: object) -> Iterator[ValidationError]:
    if wanted and isinstance(value, list) and len({_key(item) for item in value}) < len(value):
        yield ValidationError("expected no item twice")


def _key(value: object) -> object:
    """A key that is equal only for equal JSON values: 1 equals 1.0, and 1 differs from true."""
    if isinstance(value, dict):
        return frozenset((name, _key(one)) for name, one in value.items())
    if isinstance(value, list):
        return tuple(map(_key, value))
    return (value,) if isinstance(value, bool) else value


_Validator = extend(Draft202012Validator, {"pattern": _pattern, "uniqueItems": _unique})
