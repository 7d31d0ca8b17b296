"""reasoning-gym behind receipts: the same receipt gives the same question, truth and metadata in every process.

reasoning-gym alone does not guarantee that, for three reasons:
- five datasets iterate over sets of strings, so they depend on PYTHONHASHSEED: processes that draw or score run with
  `HASH_SEED`, and `entry_of` refuses to run without it;
- `list_functions`, `pool_matrix` and snippets of `codeio` use the global generators, which are seeded before each draw;
- `acre`, `gsm_symbolic` and `list_functions` use their seed during construction: they are constructed for each draw,
  the others once per configuration, since construction takes up to 0.4 s and a draw mostly 0.1 ms.

Some datasets loop endlessly under settings that they accept (base_conversion with one base, sokoban at level 0), some
print, and several scorers eval() the answer; so only child processes import this module.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import random
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from shoal.errors import OtherRelease, OutOfBounds, TaskError, did_you_mean, expected_one_of
from shoal.types import Json, Receipt

_PICTURES = (
    *("matplotlib", "matplotlib.pyplot", "matplotlib.animation", "matplotlib.collections"),
    *("mpl_toolkits", "mpl_toolkits.mplot3d"),
)


@contextlib.contextmanager
def _without_pictures() -> Iterator[None]:
    """Stubs matplotlib during the import of reasoning-gym, which needs it only to plot cellular automata.

    matplotlib would take half of a start's time and memory, and it fails without a writable folder.
    """
    absent = {name: ModuleType(name) for name in _PICTURES if name not in sys.modules}
    for stub in absent.values():
        vars(stub)["Axes3D"] = None
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


with _without_pictures():
    from reasoning_gym import factory
    from reasoning_gym.utils import SYSTEM_PROMPTS

HASH_SEED = "0"
"""PYTHONHASHSEED of every process that draws."""
VERSION = importlib.metadata.version("reasoning-gym")  # the package's __version__ names an older release

MAX_INDEX = 1 << 16
MOST_CONFIG_CHARACTERS = 4096
MOST_NUMBER = 2**31
OWN_PROMPT = "reasoning_gym:"
"""Prefix of a system prompt that names one of reasoning-gym's instructions."""

_SEED_USED_AT_CONSTRUCTION = frozenset({"acre", "gsm_symbolic", "list_functions"})
_TRUTH_IN_METADATA = ("example_answer", "example_correct_answer", "possible_answer")
_DERIVED = ("seed", "size")


class DrawFailed(TaskError):
    """This seed gives no question; another one may."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One item of a dataset, with the data for its scorer. `truth` is None if unknown."""

    question: str
    truth: str | None
    item: dict[str, object]
    dataset: Any

    def score(self, answer: str) -> float:
        """Score of an answer by the dataset's scorer. Raises any error of that scorer."""
        return float(self.dataset.score_answer(answer, self.item))


def names() -> list[str]:
    """Every dataset that can be a task. `composite` is left out: a mixture of tasks replaces it."""
    return sorted(name for name in factory.DATASETS if name != "composite")


def system_prompt(text: str) -> str:
    """The instruction that a text such as `reasoning_gym:default` names; else the text. Raises `TaskError`."""
    if not text.startswith(OWN_PROMPT):
        return text
    name = text.removeprefix(OWN_PROMPT)
    if name not in SYSTEM_PROMPTS:
        raise TaskError(f"system_prompt: {expected_one_of([OWN_PROMPT + one for one in SYSTEM_PROMPTS], text)}")
    return str(SYSTEM_PROMPTS[name])


def config_json(name: str, params: Mapping[str, Json], level: int | None) -> str:
    """The dataset's settings as JSON with sorted keys: those of the curriculum's level, overridden by `params`.

    Raises `TaskError` naming the dataset or the setting that is wrong.
    """
    _refuse_unknown(name, params)
    merged = {**({} if level is None else _curriculum_params(name, level)), **params}
    config = json.dumps(merged, sort_keys=True)
    _dataset(name, config)
    return config


def check_bounds(name: str, config: str) -> None:
    """Raises `TaskError` for a peer's invalid settings, `OutOfBounds` for those that this node does not draw with.

    A setting may name a file to read (spell_backward's words), so only the dataset's own words are accepted. Limits of
    time and memory bound the size of a question.
    """
    if len(config) > MOST_CONFIG_CHARACTERS:
        raise OutOfBounds(
            f"{name}: expected settings of at most {MOST_CONFIG_CHARACTERS} characters, got {len(config)}"
        )
    given = _params(name, config)
    known = set(_leaves([list(_fields(name)), *(default for _, default in _fields(name).values())]))
    for value in _leaves(given):
        if isinstance(value, str) and value not in known:
            raise OutOfBounds(f"{name}: expected no words in settings but the dataset's own, got {value[:80]!r}")
        if isinstance(value, int | float) and not abs(value) <= MOST_NUMBER:  # also of NaN
            raise OutOfBounds(f"{name}: expected numbers up to {MOST_NUMBER} in settings, got {value!r}"[:200])


def _leaves(value: object) -> Iterator[object]:
    """All values in lists and tables, and the tables' keys."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def entry_of(receipt: Receipt) -> Entry:
    """The item of a receipt: item `index` of a fresh dataset with the receipt's seed and configuration.

    Raises `TaskError` when it cannot be drawn here, `DrawFailed` when the generator itself fails on this seed.
    """
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        raise TaskError("questions are only reproducible in a process started with PYTHONHASHSEED=0")
    if receipt.dataset_version != VERSION:
        raise OtherRelease(f"{receipt.dataset}: drawn with reasoning-gym {receipt.dataset_version}, here is {VERSION}")
    if not (0 <= receipt.seed < 2**32 and 0 <= receipt.index < MAX_INDEX):
        raise TaskError(f"{receipt.dataset}: expected a seed below 2**32 and an index below {MAX_INDEX}, got {receipt}")
    dataset = _seeded(receipt)
    random.seed(receipt.seed + receipt.index)
    np.random.seed((receipt.seed + receipt.index) % 2**32)
    try:
        item = dataset[receipt.index]
    except Exception as error:  # generators raise many types, for example ZeroDivisionError
        raise DrawFailed(f"{receipt.dataset}: {type(error).__name__}: {error}") from error
    return Entry(item["question"], _truth(item, dataset), item, dataset)


def _seeded(receipt: Receipt) -> Any:
    """A dataset equivalent to a fresh one with the receipt's seed and configuration."""
    dataset = _dataset(receipt.dataset, receipt.config)
    if receipt.dataset in _SEED_USED_AT_CONSTRUCTION:
        return type(dataset)(_settings(receipt.dataset, receipt.config, receipt.seed, receipt.index + 1))
    dataset.seed = dataset.config.seed = receipt.seed
    # word_ladder refuses items beyond its size, and shrinks when one fails
    dataset.size = dataset.config.size = receipt.index + 1
    return dataset


@lru_cache(maxsize=64)
def _dataset(name: str, config: str) -> Any:
    try:
        settings = _settings(name, config, seed=0, size=1)
        return factory.DATASETS[name][0](settings)
    except (AssertionError, TypeError, ValueError, OSError) as error:
        raise TaskError(f"{name}: {error or 'these settings do not fit together'}; settings: {config}") from error


def _settings(name: str, config: str, seed: int, size: int) -> Any:
    """The dataset's configuration object, validated by the dataset itself."""
    given = {key: _value(name, key, value) for key, value in _params(name, config).items()}
    config_class = factory.DATASETS[name][1]
    settings = config_class(**given, seed=seed, size=size)
    if hasattr(settings, "validate"):
        settings.validate()
    return settings


def _params(name: str, config: str) -> dict[str, Json]:
    """Settings of a dataset in JSON. Raises `TaskError` for other text, and for an unknown dataset or setting."""
    try:
        params = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{name}: expected settings as JSON: {error}") from None
    if not isinstance(params, dict):
        raise TaskError(f"{name}: expected settings as a JSON object, got {config[:80]}")
    _refuse_unknown(name, params)
    return params


def _value(name: str, key: str, value: Json) -> object:
    """A setting read from its JSON form: enumerations, dates, tuples and nested tables.

    Some annotations are wrong upstream (`variables: tuple[str] = ("x", "y", "z")`), so a value of the default's type
    passes despite its annotation.
    """
    annotation, default = _fields(name)[key]
    try:
        return _adapter(annotation).validate_python(value)
    except ValidationError as error:
        if isinstance(default, tuple) and isinstance(value, list):
            return tuple(value)
        if type(value) is type(default):
            return value
        first = error.errors()[0]
        where = ".".join(str(part) for part in (key, *first["loc"]))
        message = f"{first['msg'][0].lower()}{first['msg'][1:]}"
        raise TaskError(f"{name}: params.{where}: {message}, got {first['input']!r}") from None


@lru_cache(maxsize=256)
def _fields(name: str) -> dict[str, tuple[Any, object]]:
    """Annotation and default of each setting that a user may give."""
    config_class = factory.DATASETS[name][1]
    hints, defaults = typing.get_type_hints(config_class), config_class()
    return {
        field.name: (hints[field.name], getattr(defaults, field.name))
        for field in dataclasses.fields(config_class)
        if field.name not in _DERIVED
    }


@lru_cache(maxsize=512)
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


def _refuse_unknown(name: str, params: Mapping[str, Json]) -> None:
    """Raises `TaskError` for a dataset or a setting that does not exist."""
    if name not in names():
        hint = did_you_mean(name, names()) or f"; expected one of {', '.join(names())}"
        raise TaskError(f"unknown reasoning-gym dataset {name!r}{hint}")
    known = list(_fields(name))
    for key in params:
        if key in _DERIVED:
            raise TaskError(f"{name}: params.{key}: the run derives it; leave it out")
        if key not in known:
            hint = did_you_mean(key, known) or f"; expected one of {', '.join(known)}"
            raise TaskError(f"{name}: unknown setting params.{key}{hint}")


def _curriculum_params(name: str, level: int) -> dict[str, Json]:
    """Settings of the dataset's curriculum at a level; attributes with fewer levels stay at their highest."""
    if not factory.has_curriculum(name):
        raise TaskError(f"{name}: params: this dataset has no curriculum; expected a table")
    curriculum = factory.create_curriculum(name)
    top = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if level > top:
        raise TaskError(f"{name}: params: expected a level from 0 to {top}, got {level}")
    curriculum.set_global_level(level)
    settings = curriculum.generate_configuration()
    config_class: Any = type(settings)
    dumped: dict[str, Json] = _adapter(config_class).dump_python(settings, mode="json", warnings=False)
    return {key: value for key, value in dumped.items() if key not in _DERIVED}


def _truth(item: dict[str, Any], dataset: Any) -> str | None:
    """The answer; for datasets with many right answers the metadata's example, unless their scorer rejects it.

    propositional_logic gives "P" as its example, right or wrong, when it found no conclusion.
    """
    if item["answer"] is not None:
        return str(item["answer"])
    for key in _TRUTH_IN_METADATA:
        example = item["metadata"].get(key)
        text = example if isinstance(example, str) else json.dumps(example)
        if example is not None and dataset.score_answer(text, item) == 1:
            return text
    return None
