"""Whole runs through every part, on the clock."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pydantic import JsonValue

from shoal.config import parse
from shoal.observe.metrics import Record, read_records
from shoal.run.training import run_training

SETTLED_SHARE = 0.2
"""Part of the steps at the beginning that rates leave out: the pipeline fills up."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What a run logged; times begin with the training."""

    steps: tuple[Record, ...]
    accuracies: tuple[tuple[float, float], ...]
    """Seconds of training, and the held-out accuracy (sampled) that was measured then."""
    engine_cpu_s: tuple[float, ...]
    """Of the engine process at the end of each step; 0 where there is no /proc."""

    def rate(self, name: str) -> float:
        """Of a name that counts per second: its mean over the time."""
        settled = self.steps[int(len(self.steps) * SETTLED_SHARE) :]
        return fmean((number(step, name) for step in settled), weights=self._seconds(settled))

    def mean(self, name: str) -> float:
        """Of a name over the settled steps."""
        return fmean(number(step, name) for step in self.steps[int(len(self.steps) * SETTLED_SHARE) :])

    def tokens_per_engine_cpu_s(self, samples_per_step: int) -> float | None:
        """Trained tokens per second that the engine computed: other work on the machine hardly changes it."""
        first = int(len(self.steps) * SETTLED_SHARE)
        tokens = sum(number(step, "length_mean") * samples_per_step for step in self.steps[first + 1 :])
        cpu_s = self.engine_cpu_s[-1] - self.engine_cpu_s[first]
        return tokens / cpu_s if cpu_s else None

    def seconds_to(self, accuracy: float) -> float | None:
        """When the held-out accuracy, mean of two neighbours, first reached a bound; None when it never did."""
        for (_, before), (time_s, after) in zip(self.accuracies, self.accuracies[1:], strict=False):
            if (before + after) / 2 >= accuracy:
                return time_s
        return None

    @staticmethod
    def _seconds(steps: Sequence[Record]) -> list[float]:
        return [1 / max(number(step, "samples_per_s"), 1e-9) for step in steps]


def number(record: Record, name: str) -> float:
    """A number of a record."""
    value = record.get(name)
    assert isinstance(value, int | float), (name, record)
    return float(value)


def engine_cpu_s() -> float:
    """Computing time of this process's engine process."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            if b"shoal.engine.server.http_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def measured_run(tree: Mapping[str, JsonValue], settings: Sequence[str]) -> Timed:
    """Trains as the configuration says, in a folder that is removed afterwards."""
    engine_s: list[float] = []

    def listen(record: Record) -> None:
        if record["kind"] == "step":
            engine_s.append(engine_cpu_s())

    folder = Path(tempfile.mkdtemp(prefix="shoal-experiment-"))
    try:
        config = parse(dict(tree), [*settings, f"run_dir={folder / 'run'}"])
        run_training(config, listeners=[listen])
        records = read_records(folder / "run" / "metrics.jsonl")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    evals = [record for record in records if record["kind"] == "eval"]
    began_s = number(evals[0], "time_s")
    return Timed(
        steps=tuple(record for record in records if record["kind"] == "step"),
        accuracies=tuple((number(e, "time_s") - began_s, number(e, "sampled")) for e in evals),
        engine_cpu_s=tuple(engine_s),
    )
