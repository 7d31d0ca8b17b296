"""The settings of a run: sections of fields, read from TOML with dotted overrides.

Errors name the setting. Unknown keys and names are refused with "did you mean".
"""

import os
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
from pydantic import JsonValue, ValidationError

from shoal.config.complaints import complaint
from shoal.config.presets import set_preset
from shoal.config.remote import Credit as Credit
from shoal.config.remote import SwarmConfig as SwarmConfig
from shoal.config.section import Section as Section
from shoal.config.settings import EMBEDDED
from shoal.config.settings import QUESTIONS as QUESTIONS
from shoal.config.settings import Config as Config
from shoal.config.settings import EngineConfig as EngineConfig
from shoal.config.settings import MetricsConfig as MetricsConfig
from shoal.config.settings import ModelConfig as ModelConfig
from shoal.config.settings import RewardConfig as RewardConfig
from shoal.config.settings import StageConfig as StageConfig
from shoal.config.settings import TaskConfig as TaskConfig
from shoal.config.tree import MOST_LEVELS, checked, mapped, place_of
from shoal.errors import MASK, ConfigError, did_you_mean, without_credentials
from shoal.files import siblings


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config in a TOML file with `--section.key=value` overrides. Raises `ConfigError`.

    Paths in the file are relative to its folder, paths in overrides to the current folder.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = did_you_mean(path.name, siblings(path))
        raise ConfigError(f"config file {path} does not exist{hint}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"config file {path} is nested too deeply: expected at most {MOST_LEVELS} levels") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    whole = restored(data, path)
    _make_absolute(whole, path.parent)
    return parse(whole, overrides)


def parse(data: dict[str, JsonValue], overrides: Iterable[str] = ()) -> Config:
    """The config that a tree of plain values describes. Raises `ConfigError` naming the field."""
    tree = checked(data)
    for override in overrides:
        _apply(tree, override)
    tree = checked(tree)
    _make_absolute(tree, Path())
    set_preset(tree)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(complaint(error, tree, Config)) from None


def _make_absolute(tree: dict[str, JsonValue], folder: Path) -> None:
    """Makes paths of questions, code and model directories absolute, because resolved.toml lies in another folder.

    Names of modules stay: they are found from the current folder.
    """
    tasks, model, stages = tree.get("tasks"), tree.get("model"), tree.get("stages")
    for stage in stages if isinstance(stages, list) else []:
        if isinstance(stage, dict) and isinstance(file := stage.get("data"), str):
            stage["data"] = str((folder / file).absolute())
    for task in tasks if isinstance(tasks, list) else []:
        if isinstance(task, dict) and task.get("service") == "jsonl" and isinstance(file := task.get("path"), str):
            task["path"] = str((folder / file).absolute())
        _name_code(task, folder, ("path", "agent", "scorer", "reward", "run", "parts"))
    _name_code(tree.get("train"), folder, ("loss", "advantage", "function"))
    if isinstance(model, dict) and isinstance(path := model.get("path"), str) and path not in EMBEDDED:
        directory = (folder / path).absolute()
        if os.path.isdir(directory):  # else it may be the name of a model on the hub
            model["path"] = str(directory)


def _name_code(node: JsonValue, folder: Path, keys: Sequence[str]) -> None:
    """Makes each `file.py:name` below these keys absolute."""
    for at in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        place: Any = node
        if isinstance(at, str) and at not in keys:
            continue
        if isinstance(name := place[at], str) and ".py:" in name:
            place[at] = str((folder / name).absolute())
        else:
            _name_code(name, folder, keys)


def to_toml(config: Config, hidden: dict[str, str] | None = None) -> str:
    """Every setting with its value, in the form that `load` reads; with `hidden`, credentials of urls go there."""
    tree = config.model_dump(mode="json", exclude_none=True)
    return tomli_w.dumps(tree if hidden is None else masked(tree, hidden))


def _apply(tree: dict[str, JsonValue], override: str) -> None:
    """Sets one dotted key, as in `train.lr=1e-4` or `--tasks.0.weight=2`."""
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected --section.key=value")
    try:
        value: JsonValue = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except RecursionError:
        raise ConfigError(f"{key} is nested too deeply: expected at most {MOST_LEVELS} levels") from None
    except ValueError as error:  # more digits than Python reads
        raise ConfigError(f"{key}: {error}") from None
    node, at = place_of(key, tree)
    node[at] = value


CREDENTIALS = "credentials.json"


def masked(tree: dict[str, JsonValue], hidden: dict[str, str]) -> dict[str, JsonValue]:
    """The settings without the credentials of URLs; `hidden` gets the original texts by their place.

    >>> hidden: dict[str, str] = {}
    >>> masked({"swarm": {"servers": ["nats://secret@reef:4222"]}}, hidden)
    {'swarm': {'servers': ['nats://***@reef:4222']}}
    >>> hidden
    {'.swarm.servers.0': 'nats://secret@reef:4222'}
    """

    def mask(where: str, value: JsonValue) -> JsonValue:
        if not isinstance(value, str) or f"://{MASK}@" not in (shown := without_credentials(value)):
            return value
        hidden[where] = value
        return shown

    shown: dict[str, JsonValue] = mapped(tree, mask)
    return shown


def restored(tree: dict[str, JsonValue], path: Path) -> dict[str, JsonValue]:
    """The settings of a file with the texts that `masked` hid, except where the masked text was edited since.

    The texts lie in the file's folder, unless it had none or was copied without them.
    """
    try:
        hidden = msgspec.json.decode(path.with_name(CREDENTIALS).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError, ValueError):
        hidden = {}

    def restore(where: str, value: JsonValue) -> JsonValue:
        whole = hidden.get(where, "")
        return whole if value == without_credentials(whole) else value

    whole: dict[str, JsonValue] = mapped(tree, restore)
    return whole


def refuse_masked(tree: dict[str, JsonValue]) -> None:
    """Raises `ConfigError` when settings need credentials whose file is missing."""
    hidden: dict[str, str] = {}
    masked(tree, hidden)
    for where, text in hidden.items():
        if f"://{MASK}@" in text:
            raise ConfigError(
                f"{where[1:]}: expected credentials in place of {MASK}, which {CREDENTIALS} of the run has"
            )
