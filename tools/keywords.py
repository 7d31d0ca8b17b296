"""The stub of the keywords of `shoal.train` and `shoal.open_policy`, from config/: a TypedDict per section."""

from collections import Counter
from collections.abc import Iterator
from inspect import cleandoc
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shoal.config import Config

HEAD = '''"""Types of the keywords of `shoal.train` and `shoal.open_policy`, for editors and type checkers.

Written by `make docs` from src/shoal/config/; change the field there.
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

'''
PARAMETERS = ("model", "tasks", "reward", "path")
"""Settings that have a parameter of their own."""
PATHS = ("run_dir", "backup", "data")
OWN_CODE = ("module:function", "file.py:function")
"""Words of a description whose setting takes a function too."""


def stub() -> str:
    """The whole of src/shoal/library/keywords.pyi."""
    parts = [_typed_dict(_name(kind), kind, kind.model_fields) for kind in _sections(Config) if kind is not Config]
    return "\n".join([HEAD, *parts, _typed_dict("Settings", Config, _keywords(), _name(Config.sections()["train"]))])


def _keywords() -> dict[str, FieldInfo]:
    """Settings by keyword besides those of [train]: those at the top, sections, and settings of one section only."""
    homes = list(Config.sections().values())
    count = Counter(name for section in (Config, *homes) for name in section.model_fields)
    once = {name: field for section in homes for name, field in section.model_fields.items() if count[name] == 1}
    found = {**Config.model_fields, **once}
    own = (*PARAMETERS, *Config.sections()["train"].model_fields)
    return {name: field for name, field in found.items() if name not in own}


def _name(section: type[BaseModel]) -> str:
    return section.__name__.removesuffix("Config") + "Settings"


def _sections(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The sections of a section and the section itself, each after those that it names."""
    for field in kind.model_fields.values():
        inner = field.annotation
        for one in (inner, *get_args(inner)):
            if isinstance(one, type) and issubclass(one, BaseModel) and not _is_choice(inner):
                yield from _sections(one)
    yield kind


def _is_choice(annotation: object) -> bool:
    """Whether a value is one of several sections, by its name."""
    return sum(isinstance(one, type) and issubclass(one, BaseModel) for one in get_args(annotation)) > 1


def _typed_dict(name: str, section: type[BaseModel], fields: dict[str, FieldInfo], base: str = "TypedDict") -> str:
    lines = [f"class {name}({base}, total=False):", f'    """{cleandoc(section.__doc__ or "")}"""', ""]
    for key, field in fields.items():
        kind = " | ".join(_kinds(field.annotation))
        if any(word in (field.description or "") for word in OWN_CODE):
            listed = kind.startswith("Sequence")
            kind = kind[: -1 if listed else None] + " | Callable[..., Any]" + "]" * listed
        if key in PATHS:
            kind += " | PathLike[str]"
        lines.append(f"    {key}: {kind}")
        lines += [f'    """{field.description}"""'] if field.description else []
    return "\n".join([*lines, ""])


def _kinds(annotation: object) -> Iterator[str]:
    """The types of a value, in the words of Python; of one of several sections also its name."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _kinds(arguments[0])
    elif _is_choice(annotation):
        yield from ("str", "Mapping[str, Any]", "Callable[..., Any]")
    elif origin in (Union, UnionType):
        for one in arguments:
            yield from _kinds(one)
    elif origin in (list, tuple):
        yield f"Sequence[{' | '.join(_kinds(arguments[0]))}]"
    elif origin is dict:
        yield "Mapping[str, Any]"
    elif origin is Literal:
        yield f"Literal[{', '.join(map(repr, arguments))}]".replace("'", '"')
    elif annotation is NoneType:
        yield "None"
    else:
        assert isinstance(annotation, type), annotation
        yield _name(annotation) if issubclass(annotation, BaseModel) else annotation.__name__
