"""Totals sum a run over its steps, those of earlier processes included."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import nan

from shoal.observe.metrics import Record

EVALS = ("sampled", "greedy", "sampled_reward", "greedy_reward")


@dataclass(slots=True)
class RunTotals:
    """Sums of a run."""

    samples: int = 0
    staleness_max: int = 0
    """Largest staleness of the consumed groups."""
    rewards: list[float] = field(default_factory=list)  # one per step
    evals: list[Mapping[str, float]] = field(default_factory=list)  # as `EVALS` names them, in order

    @classmethod
    def earlier(cls, records: Iterable[Record], steps: int) -> "RunTotals":
        """Sums the records of earlier processes up to step `steps`; rates are of each process alone."""
        of_step: dict[float, Record] = {}
        totals = cls()
        for record in records:
            step = _known(record, "step")
            if step > steps:
                continue
            if record["kind"] == "step":
                of_step[step] = record
            elif record["kind"] == "eval":
                totals.evals.append({name: _known(record, name) for name in EVALS})
        totals.rewards = [_known(of_step[step], "reward") for step in sorted(of_step)]
        totals.staleness_max = int(max((_known(record, "staleness_max") for record in of_step.values()), default=0))
        return totals


def _known(record: Record, name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else nan
