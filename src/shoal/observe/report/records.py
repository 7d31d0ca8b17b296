"""Run records are read from a run directory: metrics.jsonl, the configuration, and figures that sum them up."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shoal.config import Config, load
from shoal.errors import ConfigError, RunDirError
from shoal.observe.metrics import Record, read_records

EDGE_SHARE = 0.1
"""Share of the steps whose mean stands for a run's beginning, and for its end."""


@dataclass(frozen=True, slots=True)
class RunRecords:
    """Records of one run, with each step and each evaluation once: after a resume the newer one counts."""

    name: str
    steps: tuple[Record, ...]
    evals: tuple[Record, ...]
    events: tuple[Record, ...]
    config_text: str
    """Text of resolved.toml; empty without the file."""
    config: Config | None
    """Configuration of the run; None when resolved.toml is missing or of another version of Shoal."""

    def column(self, name: str) -> list[float]:
        """Values of one name over the steps; nan where a step has none."""
        return column(self.steps, name)

    def total(self, name: str) -> float:
        """Sum of one name over the steps that have it."""
        return sum(known(self.column(name)))

    def seconds(self) -> list[float]:
        """Seconds of each step, which weigh its rates and busy shares; 0 for the first step."""
        times = self.column("time_s")
        return [0.0, *(max(0.0, b - a) for a, b in pairwise(times))][: len(times)]

    def tasks(self, prefix: str) -> list[str]:
        """Names of the tasks that have `<prefix>/<task>` in the steps or evaluations, sorted."""
        return tasks_of((*self.steps, *self.evals), prefix)

    @property
    def edge(self) -> int:
        """Number of steps whose mean stands for a run's beginning, and for its end."""
        return math.ceil(len(self.steps) * EDGE_SHARE)


def read_run(run_dir: Path) -> RunRecords:
    """Reads the records of a run directory. Raises `RunDirError` for any other directory."""
    metrics, resolved = run_dir / "metrics.jsonl", run_dir / "resolved.toml"
    if not metrics.is_file() and not resolved.is_file():
        raise RunDirError(f"{run_dir}: expected a run directory, with metrics.jsonl or resolved.toml, got neither")
    return run_of(run_dir, read_records(metrics) if metrics.is_file() else [])


def run_of(run_dir: Path, records: Sequence[Record]) -> RunRecords:
    """Builds the run of a directory from the records of its metrics.jsonl."""
    resolved = run_dir / "resolved.toml"
    try:
        config = load(resolved)
    except ConfigError:
        config = None
    return RunRecords(
        name=run_dir.resolve().name,
        steps=_newest_per_step(records, "step"),
        evals=_newest_per_step(records, "eval"),
        events=tuple(record for record in records if record["kind"] == "event"),
        config_text=resolved.read_text(errors="replace") if resolved.is_file() else "",
        config=config,
    )


def column(records: Iterable[Record], name: str) -> list[float]:
    """Numbers of one name over records; nan where a record has none."""
    values = [record.get(name) for record in records]
    return [float(value) if isinstance(value, int | float) else math.nan for value in values]


def tasks_of(records: Iterable[Record], prefix: str) -> list[str]:
    """Names of the tasks that have `<prefix>/<task>` among the records, sorted."""
    marked = f"{prefix}/"
    return sorted({name.removeprefix(marked) for record in records for name in record if name.startswith(marked)})


def mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Mean of the finite values; nan without any. Weights of 0 throughout count as equal.

    >>> mean([100.0, 10.0], [1.0, 9.0])  # 100 per second for one second, then 10 per second for nine
    19.0
    """
    if weights is not None and sum(weights) > 0:
        pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if math.isfinite(value)]
        total = sum(weight for _, weight in pairs)
        return sum(value * weight for value, weight in pairs) / total if total > 0 else mean([v for v, _ in pairs])
    finite = known(values)
    return sum(finite) / len(finite) if finite else math.nan


def moving_average(values: Sequence[float], window: int, weights: Sequence[float] | None = None) -> list[float]:
    """Applies `mean` to each value and the `window - 1` values before it.

    >>> moving_average([1.0, 3.0, float("nan"), 5.0], 2)
    [1.0, 2.0, 3.0, 5.0]
    """
    spans = [slice(max(0, i + 1 - window), i + 1) for i in range(len(values))]
    return [mean(values[span], weights[span] if weights is not None else None) for span in spans]


def _newest_per_step(records: Iterable[Record], kind: str) -> tuple[Record, ...]:
    newest = {
        step: record
        for record in records
        if record["kind"] == kind and isinstance(step := record.get("step"), int | float)
    }
    return tuple(newest[step] for step in sorted(newest))


def known(values: Iterable[float]) -> list[float]:
    """The finite values."""
    return [value for value in values if math.isfinite(value)]
