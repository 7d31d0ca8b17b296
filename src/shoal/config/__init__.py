"""The settings of a run: sections of fields, read from TOML with dotted overrides.

Everything wrong in them is named. Unknown keys are refused with "did you mean".
"""

import difflib
import os
import tomllib
from collections.abc import Iterable, Sequence
from copy import deepcopy
from math import isfinite
from pathlib import Path
from typing import cast

import tomli_w
from pydantic import JsonValue, ValidationError
from pydantic_core import ErrorDetails

from shoal.config.credentials import hidden_beside, masked, restored
from shoal.config.presets import set_preset
from shoal.config.section import NoTruth
from shoal.config.section import Section as Section
from shoal.config.settings import EMBEDDED
from shoal.config.settings import Config as Config
from shoal.config.settings import Credit as Credit
from shoal.config.settings import EngineConfig as EngineConfig
from shoal.config.settings import MetricsConfig as MetricsConfig
from shoal.config.settings import ModelConfig as ModelConfig
from shoal.config.settings import RewardConfig as RewardConfig
from shoal.config.settings import SwarmConfig as SwarmConfig
from shoal.config.settings import TaskConfig as TaskConfig
from shoal.config.training import LOSSES as LOSSES
from shoal.config.training import CISPOLoss as CISPOLoss
from shoal.config.training import DecoupledLoss as DecoupledLoss
from shoal.config.training import DoubleSidedLoss as DoubleSidedLoss
from shoal.config.training import GRPOLoss as GRPOLoss
from shoal.config.training import GSPOLoss as GSPOLoss
from shoal.config.training import LoRAConfig as LoRAConfig
from shoal.config.training import LossConfig as LossConfig
from shoal.config.training import OwnLoss as OwnLoss
from shoal.config.training import PositiveOnlyLoss as PositiveOnlyLoss
from shoal.config.training import ReinforceLoss as ReinforceLoss
from shoal.config.training import SoftAdaptiveLoss as SoftAdaptiveLoss
from shoal.config.training import TrainConfig as TrainConfig
from shoal.errors import ConfigError

MOST_LEVELS = 32
"""Number of levels of tables and lists within each other."""
RENAMED = {
    "asynchrony.eta": "asynchrony.max_staleness",
}
"""Settings that have another name now. Each is refused with a sentence that says which."""


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config in a TOML file with `--section.key=value` overrides. Raises `ConfigError`.

    Files and model directories that the file names are relative to its folder; what overrides name, to this one.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"config file {path} is nested too deeply: expected at most {MOST_LEVELS} levels") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    _check_values(data)  # before anything goes down into it
    whole = restored(data, hidden_beside(path))
    assert isinstance(whole, dict)
    _make_absolute(whole, path.parent)
    return parse(whole, overrides)


def parse(data: dict[str, JsonValue], overrides: Iterable[str] = ()) -> Config:
    """The config that a tree of plain values describes. Raises `ConfigError` naming the field."""
    _check_values(data)  # before anything goes down into it
    tree = deepcopy(data)
    for override in overrides:
        _apply(tree, override)
    _check_values(tree)
    _refuse_renamed(tree)
    _make_absolute(tree, Path())
    set_preset(tree)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_sentence(error, tree)) from None


def _make_absolute(tree: dict[str, JsonValue], folder: Path) -> None:
    """Has files of questions and model directories named as seen from everywhere; resolved.toml lies elsewhere."""
    tasks, model = tree.get("tasks"), tree.get("model")
    for task in tasks if isinstance(tasks, list) else []:
        if isinstance(task, dict) and task.get("service") == "jsonl" and isinstance(file := task.get("path"), str):
            task["path"] = str((folder / file).absolute())
    if isinstance(model, dict) and isinstance(path := model.get("path"), str) and path not in EMBEDDED:
        directory = (folder / path).absolute()
        if os.path.isdir(directory):  # else it may be the name of a model on the hub
            model["path"] = str(directory)


def _check_values(tree: dict[str, JsonValue]) -> None:
    """Raises `ConfigError` for values that no setting may have, wherever they stand."""
    waiting: list[tuple[tuple[str, ...], JsonValue]] = [((), tree)]
    while waiting:
        path, value = waiting.pop()
        if len(path) > MOST_LEVELS:
            raise ConfigError(f"{path[0]} is nested too deeply: expected at most {MOST_LEVELS} levels")
        if isinstance(value, dict):
            waiting += [((*path, key), one) for key, one in value.items()]
        elif isinstance(value, list):
            waiting += [((*path, str(index)), one) for index, one in enumerate(value)]
        elif isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{'.'.join(path)}: expected a finite number, got {value}")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(
                f"{'.'.join(path)}: expected a number of at most 64 bits, got one of {value.bit_length()}"
            )
        elif isinstance(value, str) and ("\0" in value or not _is_utf8(value)):
            raise ConfigError(f"{'.'.join(path)}: expected text in UTF-8 without NUL, got {value!r}")
        elif not isinstance(value, str | int | float | bool | None):
            raise ConfigError(f"{'.'.join(path)}: expected text or a number, got the {type(value).__name__} {value}")


def _refuse_renamed(tree: dict[str, JsonValue]) -> None:
    """Raises `ConfigError` for the first setting of `RENAMED` that the tree has."""
    for old, new in RENAMED.items():
        *path, last = old.split(".")
        node: JsonValue = tree
        for part in path:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and last in node:
            raise ConfigError(f"{old}: this setting is now {new}; rename it")


def to_toml(config: Config, hidden: dict[str, str] | None = None) -> str:
    """Every setting with its value, in the form that `load` reads; with `hidden`, credentials of urls go there."""
    tree = config.model_dump(mode="json", exclude_none=True)
    return tomli_w.dumps(tree if hidden is None else cast("dict[str, object]", masked(tree, hidden)))


def _apply(data: dict[str, JsonValue], override: str) -> None:
    """Sets one dotted key, as in `train.lr=1e-4` or `--tasks.0.weight=2`."""
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected --section.key=value")
    try:
        value: JsonValue = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except RecursionError:
        raise ConfigError(f"override {key!r} is nested too deeply: expected at most {MOST_LEVELS} levels") from None
    except ValueError as error:  # more digits than Python reads
        raise ConfigError(f"override {key!r}: {error}") from None
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


def _is_utf8(text: str) -> bool:
    """False for what came as other bytes and was kept as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _child(node: JsonValue, part: str, key: str) -> JsonValue:
    if isinstance(node, list):
        if not part.isdigit() or int(part) >= len(node):
            raise ConfigError(f"override {key!r}: expected an index below {len(node)}, got {part!r}")
        return node[int(part)]
    if isinstance(node, dict):
        return node.setdefault(part, {})
    raise ConfigError(f"override {key!r}: {part!r} is inside a value, not a section")


def _sentence(error: ValidationError, tree: JsonValue) -> str:
    """The first complaint of pydantic as one sentence that names the field."""
    errors = error.errors()
    first, named = errors[0], _named(errors[0], tree)
    where = ".".join(named)
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(named[-1], _siblings([str(part) for part in first["loc"]]), n=1, cutoff=0.5)
        hint = f"; did you mean {'.'.join([*named[:-1], close[0]])!r}?" if close else ""
        return f"unknown setting {where!r}{hint}"
    if first["type"] == "value_error":
        wrong = first["ctx"]["error"]
        where = ".".join([*named, wrong.key]) if isinstance(wrong, NoTruth) else where
        return f"{where}: {wrong}" if where else str(wrong)
    if first["type"] == "missing":
        return f"{where}: missing"
    complaints = dict.fromkeys(
        f"{one['msg'][0].lower()}{one['msg'][1:]}" for one in errors if _named(one, tree) == named
    )
    return f"{where}: {' or '.join(complaints)}, got {_short(first['input'])}"


def _named(error: ErrorDetails, tree: JsonValue) -> list[str]:
    """Where the settings have what is complained of: pydantic also says which kind of loss or value it tried."""
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


def _short(value: object) -> str:
    """A value as it came, short enough for a sentence."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _siblings(path: Sequence[str]) -> list[str]:
    """The keys that would have been right where `path` ends."""
    model: type[Section] = Config
    for part in path[:-1]:
        inner: dict[str, type[Section]] = {**LOSSES, "tasks": TaskConfig, **model.sections()}
        model = inner.get(part, model)
    return list(model.model_fields)
