"""The library trains a model in one call and gives the parts of a training loop. See docs/guides/library.md."""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Unpack, cast

import msgspec
from pydantic import JsonValue

from shoal.config import Config, parse
from shoal.errors import ConfigError, TaskError
from shoal.experience.buffer import Buffer
from shoal.interfaces import RewardFunction
from shoal.plugins import name_of
from shoal.run.demo_model.warm_start import DEMO_TASK
from shoal.run.policy import Policy
from shoal.run.result import Result
from shoal.run.roles import run_token
from shoal.run.run_dir import groups_at_once, run_meta
from shoal.tasks.sdk import Definition

if TYPE_CHECKING:
    from shoal.library.keywords import Settings, TaskSettings

TaskSource: TypeAlias = "str | Path | Mapping[str, object] | TaskSettings | Definition | type"
"""Reasoning-gym dataset by name, JSONL file, table of `[[tasks]]`, or environment."""


def train(
    model: str | os.PathLike[str] = "demo",
    tasks: "Sequence[TaskSource] | TaskSource | None" = None,
    reward: RewardFunction | str | None = None,
    *,
    resume: bool = False,
    progress: bool = True,
    **settings: "Unpack[Settings]",
) -> Result:
    """Trains a model and returns the run's figures; `run_dir` and `resume` continue a stopped run.

    `reward` is a function with TRL's signature, `reward(prompts, completions, **columns)`; a task that has a scorer of
    its own is refused then. Keywords are settings (docs/reference/configuration.md): `steps=50` is `train.steps`. A
    name that two sections have is given with its section, as in `checkpoint={"every_steps": 5}`. Without `tasks` the
    embedded model spells words backward, as in `shoal demo`. Raises a `ShoalError`.

    >>> from shoal import train
    >>> result = train(steps=50, lr=3e-4, max_tokens=12)  # doctest: +SKIP
    """
    config = config_of(model, tasks, reward, **settings)
    from shoal.run.training import run_training, train_with_progress

    return (train_with_progress if progress else run_training)(config, resume=resume)


@asynccontextmanager
async def open_policy(
    model: str | os.PathLike[str] = "demo",
    tasks: "Sequence[TaskSource] | TaskSource | None" = None,
    reward: RewardFunction | str | None = None,
    **settings: "Unpack[Settings]",
) -> AsyncIterator[Policy]:
    """Starts an engine and a trainer with a model; arguments are those of `train`. Raises a `ShoalError`.

    >>> import asyncio, shoal
    >>> async def loop() -> None:
    ...     async with shoal.open_policy("demo", max_tokens=12) as policy:
    ...         for _ in range(10):
    ...             await policy.step(await policy.groups())
    ...             await policy.push()
    >>> asyncio.run(loop())  # doctest: +SKIP
    """
    from shoal.run.parts import opened_policy
    from shoal.run.prepare import prepare

    config = config_of(model, tasks, reward, **settings)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-policy-")))
        config = config.model_copy(update={"run_dir": str(folder)})
        preparing = prepare(config, token=run_token(config))
        prepared = await asyncio.to_thread(stack.enter_context, preparing)  # its checks may run coroutines
        buffer = Buffer.open(folder, run_meta(config), max_running=groups_at_once(config))
        stack.push_async_callback(buffer.close)
        yield await stack.enter_async_context(opened_policy(prepared, buffer))


def config_of(
    model: str | os.PathLike[str],
    tasks: "Sequence[TaskSource] | TaskSource | None" = None,
    reward: RewardFunction | str | None = None,
    **settings: "Unpack[Settings]",
) -> Config:
    """Builds the configuration of `train` and `open_policy`. Raises `ConfigError`, which names the keyword.

    >>> config_of("demo", "spell_backward", steps=5, group_size=4).rollout.group_size
    4
    """
    tree: dict[str, JsonValue] = {"run_dir": str(Path("runs") / time.strftime("train-%Y%m%d-%H%M%S"))}
    for keyword, value in {**settings, "path": os.fspath(model)}.items():
        home = _home(keyword)
        section = tree.setdefault(home, {}) if home else tree
        if not isinstance(section, dict):
            raise ConfigError(f"{home}: expected a table of settings, got {section!r}")
        section[keyword] = _plain(keyword, value)
    tables, path = _tables(tasks), None if reward is None else name_of("reward", reward)
    tree["tasks"] = [*tables] if path is None else [_scored_by(path, table) for table in tables]
    return parse(tree)


def _scored_by(path: str, table: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The table of a task whose answers a function scores. Raises `ConfigError` for one that has a scorer."""
    if (own := table.get("scorer")) is not None:
        raise ConfigError(f"reward: expected none for the task {table.get('name')!r}, whose scorer is {own!r}")
    return {**table, "scorer": {"name": "function", "path": path}}


def _home(keyword: str) -> str | None:
    """Section of a keyword: [train], or the one section that has it; None for a setting at the top, and a section."""
    if keyword in Config.model_fields:
        return None
    homes = [name for name, section in Config.sections().items() if keyword in section.model_fields]
    if "train" in homes:
        return "train"
    if not homes:
        raise ConfigError(f"{keyword}: no setting has this name; see docs/reference/configuration.md")
    if len(homes) > 1:
        raise ConfigError(f"{keyword}: {', '.join(homes)} have it; choose one, as in {homes[0]}={{{keyword!r}: ...}}")
    return homes[0]


def _plain(keyword: str, value: object) -> JsonValue:
    """Converts a keyword's value to TOML's types; functions become their names."""

    def named(one: object) -> str:
        if callable(one):
            return name_of(keyword, one)
        if isinstance(one, Path):
            return str(one)
        raise ConfigError(f"{keyword}: expected a setting's value or a function, got {one!r}")

    return cast(JsonValue, msgspec.to_builtins(value, enc_hook=named))


def _tables(tasks: "Sequence[TaskSource] | TaskSource | None") -> list[dict[str, JsonValue]]:
    """Tables of `[[tasks]]`; rows with a `prompt` become a file of questions, and None is the demo's task."""
    if tasks is None:
        return [DEMO_TASK]
    if isinstance(tasks, str | Path | Mapping | Definition | type):
        return [_task(tasks)]
    rows = [one for one in tasks if isinstance(one, Mapping) and "prompt" in one]
    if rows and len(rows) == len(tasks):
        return [{"name": "questions", "service": "jsonl", "path": str(_write_rows(rows))}]
    return [_task(one) for one in tasks]


def _task(source: "TaskSource") -> dict[str, JsonValue]:
    """Table of `[[tasks]]` for one source."""
    if isinstance(source, Mapping):
        return {str(key): _plain(f"tasks.{key}", value) for key, value in source.items()}
    if isinstance(source, Definition | type):
        name, kind = (
            (source.name, source.source) if isinstance(source, Definition) else (source.__name__.lower(), source)
        )
        return {"name": name, "service": "python", "path": name_of("tasks", kind)}
    if isinstance(source, str | Path):
        text = str(source)
        if text.endswith((".jsonl", ".parquet")):
            return {"name": Path(text).stem, "service": "jsonl", "path": text}
        return {"name": text.rpartition(":")[2], "service": "python", "path": text} if ":" in text else {"name": text}
    raise ConfigError(f"tasks: expected a data set, a file, a table, an environment or rows, got {source!r}")


def _write_rows(rows: Sequence[Mapping[str, object]]) -> Path:
    """Writes rows as a file of questions in a folder that the process keeps."""
    path = Path(tempfile.mkdtemp(prefix="shoal-questions-")) / "questions.jsonl"
    try:
        path.write_text("".join(f"{json.dumps(dict(row))}\n" for row in rows))
    except TypeError as error:
        raise TaskError(f"tasks: expected rows of plain values: {error}") from error
    return path
