"""Whole runs through every part, on the clock."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pydantic import JsonValue

from shoal.config import parse
from shoal.metrics import Record, read_records
from shoal.run.training import run_training

SETTLED_SHARE = 0.2
"""Part of the steps at the beginning that rates leave out: the pipeline fills up."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What a run logged; times begin with the training."""

    steps: tuple[Record, ...]
    accuracies: tuple[tuple[float, float], ...]
    """Seconds of training, and the held-out accuracy (sampled) that was measured then."""

    def rate(self, name: str) -> float:
        """Of a name that counts per second: its mean over the time."""
        settled = self.steps[int(len(self.steps) * SETTLED_SHARE) :]
        return fmean((number(step, name) for step in settled), weights=self._seconds(settled))

    def mean(self, name: str) -> float:
        """Of a name over the settled steps."""
        return fmean(number(step, name) for step in self.steps[int(len(self.steps) * SETTLED_SHARE) :])

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


def measured_run(tree: Mapping[str, JsonValue], settings: Sequence[str]) -> Timed:
    """Trains as the configuration says, in a folder that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-experiment-"))
    try:
        config = parse(dict(tree), [*settings, f"run_dir={folder / 'run'}"])
        run_training(config)
        records = read_records(folder / "run" / "metrics.jsonl")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    evals = [record for record in records if record["kind"] == "eval"]
    began_s = number(evals[0], "time_s")
    return Timed(
        steps=tuple(record for record in records if record["kind"] == "step"),
        accuracies=tuple((number(e, "time_s") - began_s, number(e, "sampled")) for e in evals),
    )
