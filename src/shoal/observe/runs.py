"""Reads runs from their directories, also while they are written: metrics.jsonl and the configuration."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Lock

from shoal.config import Config, load
from shoal.errors import ConfigError, RunDirError
from shoal.experience.log import FILE
from shoal.observe.metrics import Record, number, records_in, settings_in

METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class RunRecords:
    """Records of one run, one per step and evaluation: after a resume the newer one counts."""

    name: str
    steps: tuple[Record, ...]
    evals: tuple[Record, ...]
    events: tuple[Record, ...]
    config_text: str
    """Text of resolved.toml; empty without the file."""
    config: Config | None
    """Configuration of the run; None when resolved.toml is missing or of another version of Shoal."""
    answers: tuple[Record, ...] = ()
    """Sampled answers to the same few held-out questions at each evaluation, by step and number."""

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


class WatchedRun:
    """One run directory, never written to. Each read of metrics.jsonl continues where the last one ended."""

    def __init__(self, run_dir: Path, name: str) -> None:
        """Raises `RunDirError` when it is not a run directory."""
        if not any((run_dir / file).is_file() for file in (METRICS, "resolved.toml", FILE)):
            raise RunDirError(f"{run_dir}: expected a run directory, with {METRICS}, resolved.toml or {FILE}")
        self.run_dir, self.name = run_dir, name
        self._lock = Lock()
        self._records: list[Record] = []
        self._read_bytes = 0
        self._run: RunRecords | None = None

    @property
    def size(self) -> int:
        """Bytes of metrics.jsonl; grows with every record."""
        path = self.run_dir / METRICS
        return path.stat().st_size if path.is_file() else 0

    def records(self) -> RunRecords:
        """All records so far."""
        with self._lock:
            size = self.size
            if size < self._read_bytes:  # another run took its place
                self._records, self._read_bytes, self._run = [], 0, None
            if size > self._read_bytes:
                with (self.run_dir / METRICS).open("rb") as file:
                    file.seek(self._read_bytes)
                    new = file.read()
                whole = new.rfind(b"\n") + 1
                self._records += records_in(new[:whole])
                self._read_bytes += whole
            elif self._run is not None:
                return self._run
            self._run = _run_of(self.run_dir, self._records)
            return self._run


def read_run(run_dir: Path) -> RunRecords:
    """Reads the records of a run directory. Raises `RunDirError` for any other directory."""
    return WatchedRun(run_dir, "").records()


def watched(run_dirs: Sequence[Path]) -> dict[str, WatchedRun]:
    """Runs by unique names: the folder's name, with as many parent folders as needed."""
    paths = list(dict.fromkeys(path.resolve() for path in run_dirs))
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return {name: WatchedRun(path, name) for name, path in zip(names, paths, strict=True)}


def newest_run(folder: Path) -> Path:
    """The most recently written run in a folder. Raises `RunDirError` when the folder has no run."""
    found = {file.parent: file.stat().st_mtime for name in (METRICS, FILE) for file in folder.glob(f"*/{name}")}
    if not found:
        raise RunDirError(f"{folder} holds no run; name one: shoal view RUN")
    return max(found, key=lambda run_dir: found[run_dir])


def differences(runs: Mapping[str, RunRecords]) -> list[tuple[str, list[str]]]:
    """The settings that differ between runs, with their value in each."""
    settings = [settings_in(run.config_text) for run in runs.values()]
    names = dict.fromkeys(name for one in settings for name in one if name != "run_dir")
    rows = [(name, [str(one.get(name, "")) for one in settings]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _run_of(run_dir: Path, records: Sequence[Record]) -> RunRecords:
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
        answers=_newest_answers(records),
    )


def column(records: Iterable[Record], name: str) -> list[float]:
    """Numbers of one name over records; nan where a record has none."""
    values = (record.get(name) for record in records)
    return [math.nan if value is None or isinstance(value, str) else float(value) for value in values]


def tasks_of(records: Iterable[Record], prefix: str) -> list[str]:
    """Names of the tasks that have `<prefix>/<task>` among the records, sorted."""
    marked = f"{prefix}/"
    names = set[str]()
    for record in records:
        names.update(record)
    return sorted(name.removeprefix(marked) for name in names if name.startswith(marked))


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


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Applies `mean` to each value and the `window - 1` values before it.

    >>> moving_average([1.0, 3.0, float("nan"), 5.0], 2)
    [1.0, 2.0, 3.0, 5.0]
    """
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def _newest_per_step(records: Iterable[Record], kind: str) -> tuple[Record, ...]:
    newest = {
        step: record
        for record in records
        if record["kind"] == kind and isinstance(step := record.get("step"), int | float)
    }
    return tuple(newest[step] for step in sorted(newest))


def _newest_answers(records: Iterable[Record]) -> tuple[Record, ...]:
    newest = {(number(r, "step"), number(r, "number")): r for r in records if r["kind"] == "answer"}
    return tuple(newest[where] for where in sorted(newest))


def known(values: Iterable[float]) -> list[float]:
    """The finite values."""
    return [value for value in values if math.isfinite(value)]
