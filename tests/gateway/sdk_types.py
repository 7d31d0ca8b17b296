"""Legal requests, derived from the types of an SDK: one for each field and value that a client can send."""

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

SCHEMA = {"type": "object"}
SAMPLES: Mapping[str, Any] = {
    **{"model": "m", "name": "add", "arguments": '{"x": 1}', "input": {"x": 1}, "n": 2, "logprobs": 0},
    **{"schema": SCHEMA, "parameters": SCHEMA, "input_schema": SCHEMA, "logit_bias": {"5": 1}},
    "tool_choice.tools": {"type": "function", "name": "add"},
    "tool_choice.allowed_tools.tools": {"type": "function", "function": {"name": "add"}},
}
"""Values by path or by the last name of a path, where any value of the type would not do."""
SCALARS: Mapping[object, tuple[Any, ...]] = {str: ("a",), int: (1,), float: (0.5,), bool: (True, False), object: ({},)}
Case = tuple[str, Any]
"""Path of a field, such as `tools[].type`, and a whole value that has it."""


def cases(kind: object, path: str, served: Mapping[str, object]) -> Iterator[Case]:
    """Legal values of a type at a path, each with the path of the field in which it differs from a minimal one.

    Of an alternative whose `type` or `role` is not among those in `served` there is a minimal one alone.
    """
    for one in _alternatives(kind):
        if is_typeddict(one):
            yield from _objects(one, path, served, several=len(_alternatives(kind)) > 1)
        elif _is_list(one):
            yield from ((name, [value]) for name, value in cases(get_args(one)[0], f"{path}[]", served))
        else:
            yield from ((path, value) for value in _values(one, path))


def _objects(kind: Any, path: str, served: Mapping[str, object], *, several: bool) -> Iterator[Case]:
    hints = get_type_hints(kind, include_extras=True)
    # An annotation that is a string hides its `Required` from `__required_keys__`.
    required = [name for name in hints if name in kind.__required_keys__ or get_origin(hints[name]) is Required]
    minimal = {name: _first(hints[name], _below(path, name), served) for name in required}
    for tag in ("type", "role") if several else ():
        tags = [value for one in _alternatives(hints.get(tag, object)) for value in _literals(one)]
        if tags:
            known = served.get(_below(path, tag))
            if isinstance(known, tuple) and known and not set(tags) & set(known):
                yield _below(path, tag), {**minimal, tag: tags[0]}
                return
            minimal[tag] = next((one for one in tags if not known or one in known), tags[0])  # type: ignore[operator]
            break
    yield path, minimal
    for name, hint in hints.items():
        yield from ((below, {**minimal, name: value}) for below, value in cases(hint, _below(path, name), served))


def _first(kind: object, path: str, served: Mapping[str, object]) -> Any:
    return next(value for _, value in cases(kind, path, served))


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _alternatives(kind: object) -> list[Any]:
    if get_origin(kind) in (Required, NotRequired, Annotated):
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return [one for part in get_args(kind) for one in _alternatives(part)]
    return [kind]


def _is_list(kind: object) -> bool:
    return getattr(get_origin(kind), "__name__", "") in ("list", "Iterable", "Sequence")


def _literals(kind: object) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _values(kind: object, path: str) -> tuple[Any, ...]:
    """Values of a scalar type; none of a type that the SDK turns into another one, such as a file."""
    last = path.rpartition(".")[2].removesuffix("[]")
    if kind is type(None):
        return (None,)
    if last == "model":
        return ("m",)
    if literals := _literals(kind):
        return literals
    for name in (path.removesuffix("[]"), last):
        is_object = get_origin(kind) is dict or kind is object
        if name in SAMPLES and isinstance(SAMPLES[name], dict if is_object else get_origin(kind) or kind):  # type: ignore[arg-type]
            return (SAMPLES[name],)
    return ({"a": "b"},) if get_origin(kind) is dict else SCALARS.get(kind, ())
