"""Trace of a run for Perfetto and chrome://tracing: work, waits and numbers over time.

Lanes and bars are those of the page's timeline, over all steps. Evaluations and events are marks; a few numbers of each
step are counters. Format: Trace Event Format, JSON object form; times in microseconds of the run.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from shoal.errors import RunDirError
from shoal.files import replaced
from shoal.observe.metrics import number
from shoal.observe.runs import RunRecords, read_run
from shoal.observe.view.timeline import ENGINE, GATE, PUSH, REWARDS, TRAINER, bars_of
from shoal.types import Json

LANES = (TRAINER, ENGINE, GATE, REWARDS, PUSH, "events")
COUNTERS = ("reward", "tokens_per_s", "staleness_mean", "waiting", "engine_busy", "trainer_busy")
PID = 1


def write_trace(run_dir: Path, file: Path) -> int:
    """Writes the trace of a run and returns its number of bars. Raises `RunDirError`."""
    run = read_run(run_dir)
    events = list(trace_events(run))
    try:
        with replaced(file) as target:
            target.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise RunDirError(f"{file} cannot be written: {error.strerror}") from error
    return sum(event["ph"] == "X" for event in events)


def trace_events(run: RunRecords) -> Iterator[dict[str, Json]]:
    """Events of a run: names of lanes, then bars, counters and marks."""
    yield {"ph": "M", "pid": PID, "name": "process_name", "args": {"name": f"shoal {run.name}"}}
    for tid, lane in enumerate(LANES):
        yield {"ph": "M", "pid": PID, "tid": tid, "name": "thread_name", "args": {"name": lane}}
    for before, step in pairwise(run.steps):
        for bar in bars_of(before, step):
            where: dict[str, Json] = {"pid": PID, "tid": LANES.index(bar.lane), "ts": _us(bar.start_s)}
            kind = "wait" if bar.is_wait else "work"
            yield {
                "ph": "X",
                "name": bar.does,
                "cat": kind,
                "dur": _us(bar.took_s),
                "args": {"step": bar.step},
                **where,
            }
    for step in run.steps:
        for name in COUNTERS:
            if isinstance(value := step.get(name), int | float):
                at = _us(number(step, "time_s", 0.0))
                yield {"ph": "C", "pid": PID, "name": name, "ts": at, "args": {name: float(value)}}
    for record in (*run.evals, *run.events):
        name = f"evaluation after step {record.get('step')}" if record["kind"] == "eval" else str(record.get("name"))
        said: dict[str, Json] = {key: value for key, value in record.items() if key not in ("kind", "name", "time_s")}
        at = _us(number(record, "time_s", 0.0))
        mark: dict[str, Json] = {"ph": "i", "s": "t", "pid": PID, "tid": LANES.index("events")}
        yield {**mark, "name": name, "ts": at, "args": said}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
