"""Settings are read from TOML with dotted overrides. Unknown keys are refused with "did you mean"."""

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path

import tomli_w
from pydantic import BaseModel, JsonValue, ValidationError

from shoal.config.losses import LOSSES
from shoal.config.section import Section
from shoal.config.settings import Config, TaskConfig
from shoal.errors import ConfigError

RENAMED = {
    "asynchrony.eta": "asynchrony.max_staleness",
}
"""Settings that have another name now. Each is refused with a sentence that says which."""


def known_keys(model: type[BaseModel]) -> list[str]:
    """The names of a section's fields."""
    return list(model.model_fields)


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config in a TOML file with `--section.key=value` overrides. Raises `ConfigError`."""
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from error
    return parse(data, overrides)


def parse(data: dict[str, JsonValue], overrides: Iterable[str] = ()) -> Config:
    """The config that a tree of plain values describes. Raises `ConfigError` naming the field."""
    tree = deepcopy(data)
    for override in overrides:
        _apply(tree, override)
    _refuse_renamed(tree)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None


def _refuse_renamed(tree: dict[str, JsonValue]) -> None:
    """Raises `ConfigError` for the first setting of `RENAMED` that the tree has."""
    for old, new in RENAMED.items():
        *path, last = old.split(".")
        node: JsonValue = tree
        for part in path:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and last in node:
            raise ConfigError(f"{old}: this setting is now {new}; rename it")


def to_toml(config: Config) -> str:
    """Every setting with its value, in the form that `load` reads."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _apply(data: dict[str, JsonValue], override: str) -> None:
    """Sets one dotted key, as in `train.lr=1e-4` or `--tasks.0.weight=2`."""
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected --section.key=value")
    try:
        value: JsonValue = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, last = key.split(".")
    node: JsonValue = data
    for part in path:
        node = _child(node, part, key)
    if isinstance(node, list):
        _child(node, last, key)
        node[int(last)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"override {key!r}: {path[-1]!r} is a value, not a section")


def _child(node: JsonValue, part: str, key: str) -> JsonValue:
    if isinstance(node, list):
        if not part.isdigit() or int(part) >= len(node):
            raise ConfigError(f"override {key!r}: expected an index below {len(node)}, got {part!r}")
        return node[int(part)]
    if isinstance(node, dict):
        return node.setdefault(part, {})
    raise ConfigError(f"override {key!r}: {part!r} is inside a value, not a section")


def _sentence(error: ValidationError) -> str:
    """The first complaint of pydantic as one sentence that names the field."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    # After a loss pydantic names which one it is; a setting has no such part.
    shown = [part for before, part in zip(["", *path], path, strict=False) if before != "loss" or part not in LOSSES]
    where = ".".join(shown)
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(path[-1], _siblings(path), n=1, cutoff=0.5)
        hint = f"; did you mean {'.'.join([*shown[:-1], close[0]])!r}?" if close else ""
        return f"unknown setting {where!r}{hint}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"]) if not where else f"{where}: {first['ctx']['error']}"
    if first["type"] == "missing":
        return f"{where}: missing"
    return f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}"


def _siblings(path: Sequence[str]) -> list[str]:
    """The keys that would have been right where `path` ends."""
    model: type[Section] = Config
    for part in path[:-1]:
        if part in LOSSES:
            model = LOSSES[part]
        elif part == "tasks":
            model = TaskConfig
        elif part in model.model_fields:
            annotation = model.model_fields[part].annotation
            if isinstance(annotation, type) and issubclass(annotation, Section):
                model = annotation
    return known_keys(model)
