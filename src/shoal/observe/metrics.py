"""Metrics go to metrics.jsonl always, to other trackers on request, and are read again, also while they are written.

metrics.jsonl holds one JSON object per line. Its `kind` is "step" (one training step), "eval" (held-out questions),
"answer" (to one held-out question) or "event". `time_s` counts from the run's start, without the time between a
crash and a resume. names.toml defines every number; all trackers use these names.
"""

import math
import os
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import TypeAlias

import msgspec
from pydantic import JsonValue

from shoal.config import Config, MetricsConfig, load
from shoal.config.tree import mapped
from shoal.errors import ConfigError, RunDirError, without_credentials
from shoal.experience.log import FILE
from shoal.observe.trackers import OtherTracker, TrackedRun, other_tracker

WARNINGS = frozenset(
    {
        "rollout_failed",
        "groups_unusable",
        "cannot_learn",
        "standstill",
        "reward_collapsed",
        "evaluation_costs",
        "left_out",
        "pays_a_constant",
        "few_questions",
    }
)
"""Events that explain why the run does not learn."""
Record: TypeAlias = Mapping[str, float | str | None]
_record_decoder = msgspec.json.Decoder(dict[str, int | float | str | None])


def stage(what: str) -> Record:
    """Builds the record of the current stage of a starting run."""
    return {"kind": "stage", "name": what}


def read_records(path: Path) -> list[Record]:
    """Reads the records of a metrics.jsonl, in order, without a line torn by a crash. Raises `RunDirError`."""
    try:
        return records_in(path.read_bytes())
    except OSError as error:
        raise RunDirError(f"{path}: expected a metrics file, got {error.strerror}") from error


def records_in(data: bytes) -> list[Record]:
    """Decodes the records among the lines of a metrics.jsonl."""
    return [record for line in data.splitlines() if (record := _record(line)) is not None]


def _record(line: bytes) -> Record | None:
    try:
        record = _record_decoder.decode(line)
    except msgspec.MsgspecError:
        return None
    return record if "kind" in record else None


def number(record: Record, name: str, missing: float = math.nan) -> float:
    """A number of a record."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else missing


class JsonlTracker:
    """Tracker that appends to metrics.jsonl. Each record is one write of one line, so a crash tears at most the
    last."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Continues after the records in `path`. Raises `RunDirError` when it cannot be written."""
        earlier = read_records(path) if path.exists() else []
        passed_s = max((number(record, "time_s", 0.0) for record in earlier), default=0.0)
        self._clock = clock
        self._started_at = clock() - passed_s
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                self._append(b"\n")
        except OSError as error:
            raise RunDirError(f"{path}: expected to write metrics there, got {error.strerror}") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a "step" record."""
        self.write("step", {"step": step, **values})

    def write(self, kind: str, values: Record) -> Record:
        """Writes one record and returns it, without credentials of URLs; numbers that are not finite become null.

        Raises `RunDirError`.
        """
        time_s = round(self._clock() - self._started_at, 3)
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        shown = {k: without_credentials(v) if isinstance(v, str) else v for k, v in finite.items()}
        record: Record = {"kind": kind, "time_s": time_s, **shown}
        try:
            self._append(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            raise RunDirError(
                f"metrics.jsonl cannot be written: {error.strerror}; free space, then --resume"
            ) from error
        return record

    def _append(self, line: bytes) -> None:
        """Writes a whole line or, on a full disk, nothing: the next line must not follow half a line."""
        size = os.fstat(self._file).st_size
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, size)
            raise

    def close(self) -> None:
        """Closes the file; no write is pending."""
        os.close(self._file)


class Trackers:
    """All trackers of a run as one. metrics.jsonl comes first: if its write fails, no other tracker gets the record."""

    def __init__(
        self,
        jsonl: JsonlTracker,
        others: Sequence[OtherTracker] = (),
        listeners: Sequence[Callable[[Record], None]] = (),
    ) -> None:
        """`listeners` get each record as written, for live progress."""
        self._jsonl = jsonl
        self._others = tuple(others)
        self._listeners = tuple(listeners)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records one training step."""
        self._tell(self._jsonl.write("step", {"step": step, **values}))
        for other in self._others:
            other.log(step, values)

    def log_eval(self, step: int, values: Mapping[str, float | None]) -> None:
        """Records one evaluation after `step` steps; None marks a number that was not measured."""
        self._tell(self._jsonl.write("eval", {"step": step, **values}))
        known = {f"eval/{name}": value for name, value in values.items() if value is not None}
        for other in self._others:
            other.log(step, known)

    def log_answers(self, step: int, answers: Sequence[Record]) -> None:
        """Records sampled answers to held-out questions, in metrics.jsonl and as tables; see `names.ANSWER_NAMES`."""
        for answer in answers:
            self._tell(self._jsonl.write("answer", {"step": step, **answer}))
        for other in self._others:
            if answers:
                other.log_answers(step, answers)

    def stage(self, what: str) -> None:
        """Notifies listeners of the stage of a starting run; metrics.jsonl does not record it."""
        self._tell(stage(what))

    def log_event(self, name: str, **details: float | str | None) -> None:
        """Records an event, in metrics.jsonl only."""
        self._tell(self._jsonl.write("event", {"name": name, **details}))

    def close(self) -> None:
        """Closes every tracker."""
        for tracker in self._others:
            tracker.close()
        self._jsonl.close()

    def _tell(self, record: Record) -> None:
        for listener in self._listeners:
            listener(record)


def settings_in(text: str) -> dict[str, JsonValue]:
    """Values of a TOML text by dotted name up to the first parse error; empty if the text is not TOML."""
    found: dict[str, JsonValue] = {}
    with suppress(tomllib.TOMLDecodeError, ConfigError):
        mapped(tomllib.loads(text), lambda where, value: found.setdefault(where[1:], value))
    return found


def trackers_of(settings: MetricsConfig, run_dir: Path, listeners: Sequence[Callable[[Record], None]] = ()) -> Trackers:
    """Opens the trackers of the settings. Raises `ConfigError` or `RunDirError`, leaving nothing open."""
    others: list[OtherTracker] = []
    try:
        resolved = run_dir / "resolved.toml"
        tracked = TrackedRun(run_dir, settings_in(resolved.read_text(encoding="utf-8") if resolved.is_file() else ""))
        for text in settings.trackers:
            others.append(other_tracker(text, tracked))
        return Trackers(JsonlTracker(run_dir / "metrics.jsonl"), others, listeners)
    except (ConfigError, RunDirError):
        for other in others:
            other.close()
        raise


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
