"""The library trains a model in one call and gives the parts of a training loop. See docs/library.md."""

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pydantic import JsonValue

from shoal.config import Config, Section, parse
from shoal.errors import ConfigError, TaskError
from shoal.plugins import name_of
from shoal.run.demo import DEMO_TASK
from shoal.tasks.sdk import Definition

TaskSource: TypeAlias = str | Path | Mapping[str, object] | Definition | type
"""Reasoning-gym dataset by name, JSONL file, table of `[[tasks]]`, or environment."""


@dataclass(frozen=True, slots=True)
class Result:
    """Figures and directory of a finished run. Accuracies are held-out; rewards are means of a tenth."""

    accuracy_before: float
    accuracy_after: float
    greedy_before: float
    greedy_after: float
    reward_first: float
    reward_last: float
    steps: int
    run_dir: Path

    @property
    def model(self) -> Path:
        """Path of the trained model, a Hugging Face directory."""
        return self.run_dir / "model"

    def report(self) -> Path:
        """Writes report.png and report.html into the run directory; returns the page's path."""
        from shoal.observe.report import write_report

        return write_report(self.run_dir)[1]


def train(
    model: str | os.PathLike[str] = "demo",
    tasks: Sequence[TaskSource] | TaskSource | None = None,
    reward: object = None,
    *,
    resume: bool = False,
    progress: bool = True,
    **settings: object,
) -> Result:
    """Trains a model and returns the run's figures; `run_dir` and `resume` continue a stopped run.

    `reward` is a function with TRL's signature, `reward(prompts, completions, **columns)`, for tasks that do not score
    themselves. Keywords are settings of docs/configuration.md: `steps=50` is `train.steps`. A name that two sections
    have is given with its section, as in `metrics={"wandb": "project"}`. Without `tasks` the embedded model spells
    words backward, as in `shoal demo`. Raises a `ShoalError`.

    >>> from shoal import train
    >>> result = train(steps=50, lr=3e-4, max_tokens=12)  # doctest: +SKIP
    """
    from shoal.observe.progress import LiveProgress
    from shoal.run.training import run_training

    config = config_of(model, tasks, reward, **settings)
    if not progress:
        outcome = run_training(config, resume=resume)
    else:
        with LiveProgress(config.train.steps, config.asynchrony.max_staleness) as shown:
            outcome = run_training(config, resume=resume, listeners=[shown.update])
    return Result(
        outcome.accuracy_before,
        outcome.accuracy_after,
        outcome.greedy_before,
        outcome.greedy_after,
        outcome.reward_first,
        outcome.reward_last,
        outcome.steps,
        Path(outcome.run_dir),
    )


def config_of(
    model: str | os.PathLike[str],
    tasks: Sequence[TaskSource] | TaskSource | None = None,
    reward: object = None,
    **settings: object,
) -> Config:
    """Builds the configuration of `train` and `open_policy`. Raises `ConfigError`, which names the keyword.

    >>> config_of("demo", "spell_backward", steps=5, group_size=4).rollout.group_size
    4
    """
    tree: dict[str, JsonValue] = {"run_dir": str(Path("runs") / time.strftime("train-%Y%m%d-%H%M%S"))}
    for keyword, value in settings.items():
        path = _setting(keyword, value)
        node: dict[str, JsonValue] = tree
        for part in path[:-1]:
            inner = node.setdefault(part, {})
            assert isinstance(inner, dict), f"{part} is a section"
            node = inner
        node[path[-1]] = _plain(keyword, value)
    section = tree.setdefault("model", {})
    assert isinstance(section, dict), "model is a section"
    section["path"] = os.fspath(model)
    scorer: dict[str, JsonValue] = {}
    if reward is not None:
        scorer["scorer"] = {"name": "function", "path": name_of("reward", reward)}
    tree["tasks"] = [{**scorer, **table} for table in _tables(tasks)]
    return parse(tree)


def _setting(keyword: str, value: object) -> list[str]:
    """Path of a keyword in the configuration: the top, [train], or the one section that has it."""
    fields = Config.model_fields
    if keyword in fields and not (keyword == "train" and not isinstance(value, dict)):
        return [keyword]
    sections = {name: kind for name, field in fields.items() if (kind := _section(field.annotation)) is not None}
    homes = [name for name, kind in sections.items() if keyword in kind.model_fields]
    if "train" in homes:
        return ["train", keyword]
    if len(homes) == 1:
        return [homes[0], keyword]
    if not homes:
        raise ConfigError(f"{keyword}: no setting has this name; see docs/configuration.md")
    raise ConfigError(f"{keyword}: {', '.join(homes)} have it; say which, as in {homes[0]}={{{keyword!r}: ...}}")


def _section(annotation: object) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _plain(keyword: str, value: object) -> JsonValue:
    """Converts a keyword's value to TOML's types; functions become their names."""
    if callable(value):
        return name_of(keyword, value)
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{keyword}.{key}", one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(keyword, one) for one in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ConfigError(f"{keyword}: expected a setting's value or a function, got {value!r}")


def _tables(tasks: Sequence[TaskSource] | TaskSource | None) -> list[dict[str, JsonValue]]:
    """Tables of `[[tasks]]`; rows with a `prompt` become a file of questions, and None is the demo's task."""
    if tasks is None:
        return [DEMO_TASK]
    if isinstance(tasks, str | Path | Mapping | Definition | type):
        return [_task(tasks)]
    rows = [one for one in tasks if isinstance(one, Mapping) and "prompt" in one]
    if rows and len(rows) == len(tasks):
        return [{"name": "questions", "service": "jsonl", "path": str(_write_rows(rows))}]
    return [_task(one) for one in tasks]


def _task(source: TaskSource) -> dict[str, JsonValue]:
    """Table of `[[tasks]]` for one source."""
    if isinstance(source, Mapping):
        return {str(key): _plain(f"tasks.{key}", value) for key, value in source.items()}
    if isinstance(source, Definition):
        return {"name": source.name, "service": "python", "path": name_of("tasks", source.source)}
    if isinstance(source, type):
        return {"name": source.__name__.lower(), "service": "python", "path": name_of("tasks", source)}
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
