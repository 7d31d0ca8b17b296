"""JSON Schema: the keywords that say what a value may be. Pure.

Every keyword of the 2020-12 vocabulary that validates is known except `unevaluated*`, `dependent*`, `contains`,
`patternProperties`, `propertyNames` and `if`; a schema that uses one of those is refused rather than half obeyed.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

_SILENT = frozenset(
    {"$schema", "$id", "$defs", "definitions", "$comment", "title", "description", "default", "examples", "format"}
)
_TYPES: Mapping[str, Callable[[object], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ),
}
_FENCE = re.compile(r"```(?:json)?[^\S\n]*\n(.*?)```", re.DOTALL)


def json_in(answer: str) -> object:
    """The JSON value of an answer: all of it, or its last fenced block. Raises `ValueError`.

    >>> json_in('Here: ```json\\n{"a": 1}\\n```'), json_in("[1]")
    ({'a': 1}, [1])
    """
    blocks = _FENCE.findall(answer)
    return json.loads(blocks[-1] if blocks else answer)


def complaint(value: object, schema: object, root: object = None, path: str = "$") -> str:
    """Where and why a schema does not accept a value; empty when it does. Raises `ValueError` for a bad schema.

    >>> complaint({"a": "x"}, {"type": "object", "properties": {"a": {"type": "integer"}}})
    '$.a: expected integer'
    >>> complaint({"a": 1}, {"type": "object", "required": ["a"]})
    ''
    """
    return next(_complaints(value, schema, schema if root is None else root, path), "")


def check_schema(schema: object) -> None:
    """Raises `ValueError` for a schema with a keyword that is not known here."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"expected a schema, got {json.dumps(schema)[:60]}")
    unknown = sorted(set(schema) - _SILENT - set(_KEYWORDS) - {"$ref", "additionalProperties"})
    if unknown:
        raise ValueError(f"the JSON Schema keyword {unknown[0]!r} is not supported; known: {', '.join(_KEYWORDS)}")
    for key in ("properties", "$defs", "definitions"):
        for inner in _table(schema.get(key, {}), key).values():
            check_schema(inner)
    for key in ("anyOf", "allOf", "oneOf", "prefixItems"):
        for inner in _list(schema.get(key, []), key):
            check_schema(inner)
    for key in ("items", "additionalProperties", "not"):
        if key in schema:
            check_schema(schema[key])


def _complaints(value: object, schema: object, root: object, path: str) -> Iterator[str]:
    if isinstance(schema, bool):
        if not schema:
            yield f"{path}: not allowed"
        return
    table = _table(schema, "a schema")
    if "$ref" in table:
        yield from _complaints(value, _resolved(str(table["$ref"]), root), root, path)
    for keyword, argument in table.items():
        if keyword in _KEYWORDS:
            yield from _KEYWORDS[keyword](value, argument, root, path)
    if isinstance(value, dict) and "additionalProperties" in table:
        known = _table(table.get("properties", {}), "properties")
        for name in value.keys() - known.keys():
            yield from _complaints(value[name], table["additionalProperties"], root, f"{path}.{name}")


def _resolved(reference: str, root: object) -> object:
    if not reference.startswith("#"):
        raise ValueError(f"$ref: expected one within the schema, such as #/$defs/item, got {reference!r}")
    found = root
    for part in reference[1:].split("/")[1:]:
        found = _table(found, reference).get(part.replace("~1", "/").replace("~0", "~"))
    return found


def _type(value: object, argument: object, root: object, path: str) -> Iterator[str]:
    names = [argument] if isinstance(argument, str) else _list(argument, "type")
    if not any(_TYPES[str(name)](value) for name in names):
        yield f"{path}: expected {' or '.join(map(str, names))}"


def _enum(value: object, argument: object, root: object, path: str) -> Iterator[str]:
    if not any(same(value, choice) for choice in _list(argument, "enum")):
        yield f"{path}: expected one of {json.dumps(argument)[:80]}"


def _const(value: object, argument: object, root: object, path: str) -> Iterator[str]:
    if not same(value, argument):
        yield f"{path}: expected {json.dumps(argument)[:80]}"


def same(one: object, other: object) -> bool:
    """Equality of JSON values: 1 and 1.0 are equal, 1 and true are not.

    >>> same([1, {"a": 2.0}], [1.0, {"a": 2}]), same(1, True)
    (True, False)
    """
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _properties(value: object, argument: object, root: object, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in _table(argument, "properties").items():
            if name in value:
                yield from _complaints(value[name], inner, root, f"{path}.{name}")


def _required(value: object, argument: object, root: object, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name in _list(argument, "required"):
            if name not in value:
                yield f"{path}: {name} is missing"


def _items(value: object, argument: object, root: object, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for position, item in enumerate(value):
            yield from _complaints(item, argument, root, f"{path}[{position}]")


def _prefix_items(value: object, argument: object, root: object, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for position, (item, inner) in enumerate(zip(value, _list(argument, "prefixItems"), strict=False)):
            yield from _complaints(item, inner, root, f"{path}[{position}]")


def _unique(value: object, argument: object, root: object, path: str) -> Iterator[str]:
    if argument is True and isinstance(value, list):
        texts = [json.dumps(item, sort_keys=True) for item in value]
        if len(set(texts)) < len(texts):
            yield f"{path}: expected no item twice"


def _pattern(value: object, argument: object, root: object, path: str) -> Iterator[str]:
    if isinstance(value, str) and not re.search(str(argument), value):
        yield f"{path}: expected text that matches {argument}"


def _any_of(value: object, argument: object, root: object, path: str) -> Iterator[str]:
    if not any(complaint(value, inner, root, path) == "" for inner in _list(argument, "anyOf")):
        yield f"{path}: expected any of {len(_list(argument, 'anyOf'))} schemas"


def _one_of(value: object, argument: object, root: object, path: str) -> Iterator[str]:
    count = sum(complaint(value, inner, root, path) == "" for inner in _list(argument, "oneOf"))
    if count != 1:
        yield f"{path}: expected exactly one of {len(_list(argument, 'oneOf'))} schemas, {count} accept"


def _all_of(value: object, argument: object, root: object, path: str) -> Iterator[str]:
    for inner in _list(argument, "allOf"):
        yield from _complaints(value, inner, root, path)


def _not(value: object, argument: object, root: object, path: str) -> Iterator[str]:
    if complaint(value, argument, root, path) == "":
        yield f"{path}: expected what `not` refuses"


_Rule = Callable[[object, object, object, str], Iterator[str]]


def _bound(measure: Callable[[object], float | None], holds: Callable[[float, float], bool], words: str) -> _Rule:
    def rule(value: object, argument: object, root: object, path: str) -> Iterator[str]:
        measured = measure(value)
        if not isinstance(argument, int | float):
            raise ValueError(f"expected a number as a bound, got {json.dumps(argument)[:60]}")
        if measured is not None and not holds(measured, argument):
            yield f"{path}: expected {words} {argument}"

    return rule


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _size(kind: type[Sequence[object]] | type[Mapping[str, object]]) -> Callable[[object], float | None]:
    return lambda value: len(value) if isinstance(value, kind) else None


_KEYWORDS: Mapping[str, _Rule] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "properties": _properties,
    "required": _required,
    "items": _items,
    "prefixItems": _prefix_items,
    "uniqueItems": _unique,
    "pattern": _pattern,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "allOf": _all_of,
    "not": _not,
    "minimum": _bound(_number, lambda a, b: a >= b, "at least"),
    "maximum": _bound(_number, lambda a, b: a <= b, "at most"),
    "exclusiveMinimum": _bound(_number, lambda a, b: a > b, "more than"),
    "exclusiveMaximum": _bound(_number, lambda a, b: a < b, "less than"),
    "multipleOf": _bound(_number, lambda a, b: (a / b).is_integer(), "a multiple of"),
    "minLength": _bound(_size(str), lambda a, b: a >= b, "a length of at least"),
    "maxLength": _bound(_size(str), lambda a, b: a <= b, "a length of at most"),
    "minItems": _bound(_size(list), lambda a, b: a >= b, "a length of at least"),
    "maxItems": _bound(_size(list), lambda a, b: a <= b, "a length of at most"),
    "minProperties": _bound(_size(dict), lambda a, b: a >= b, "a size of at least"),
    "maxProperties": _bound(_size(dict), lambda a, b: a <= b, "a size of at most"),
}


def _table(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: expected an object, got {json.dumps(value)[:60]}")
    return value


def _list(value: object, what: str) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{what}: expected a list, got {json.dumps(value)[:60]}")
    return value
