"""Metrics go to metrics.jsonl always, and to TensorBoard and other trackers on request.

metrics.jsonl holds one JSON object per line. Its `kind` is "step" (one training step), "eval" (held-out questions),
"answer" (to one held-out question) or "event". `time_s` counts from the run's start, without the time between a
crash and a resume. names.toml defines every number; all trackers use these names.
"""

import math
import os
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec
from pydantic import JsonValue

from shoal.config import MetricsConfig
from shoal.config.tree import mapped
from shoal.errors import ConfigError, RunDirError, without_credentials
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
