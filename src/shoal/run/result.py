"""The result of a run, and sums over the steps of all its processes."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import nan
from pathlib import Path

from shoal.observe.metrics import Record, number

EVALS = ("sampled", "greedy", "sampled_reward", "greedy_reward")


@dataclass(frozen=True, slots=True)
class Result:
    """Figures and directory of a finished run. Accuracies are held-out."""

    accuracy_before: float
    accuracy_after: float
    greedy_before: float
    greedy_after: float
    eval_reward_before: float
    eval_reward_after: float
    """Mean reward of the held-out questions, sampled."""
    reward_first: float
    reward_last: float
    """Means over the first and the last tenth of the steps."""
    wall_s: float
    """Seconds of all processes of the run."""
    steps: int
    samples_per_s: float
    """Rollouts that steps consumed, per second of training."""
    staleness_max: int
    parity: float
    run_dir: Path
    improvement: str
    """Sentence on what is certain about the trained model's held-out accuracy; empty without held-out answers."""
    warning: str
    """Reason why the run may have learned nothing; empty without a sign of it."""

    @property
    def model(self) -> Path:
        """Path of the trained model, a Hugging Face directory."""
        return self.run_dir / "model"

    @property
    def figures(self) -> dict[str, object]:
        """JSON values by name."""
        return {**asdict(self), "run_dir": str(self.run_dir)}

    def _repr_html_(self) -> str:
        """Draws the run in a notebook: curves, sampled answers before and after, figures."""
        from shoal.observe.report import result_html

        return result_html(self.run_dir)

    def report(self) -> Path:
        """Writes report.png and report.html into the run directory; returns the page's path."""
        from shoal.observe.report import write_report

        return write_report(self.run_dir)[1]


@dataclass(slots=True)
class RunTotals:
    """Sums of a run over its steps, those of earlier processes included."""

    samples: float = 0.0
    trained_s: float = 0.0
    """Seconds of the steps of earlier processes."""
    wall_s: float = 0.0
    """Seconds of earlier processes."""
    staleness_max: int = 0
    """Largest staleness of the consumed groups."""
    rewards: list[float] = field(default_factory=list)  # one per step
    evals: list[Mapping[str, float]] = field(default_factory=list)  # as `EVALS` names them, in order

    @classmethod
    def earlier(cls, records: Iterable[Record], steps: int) -> "RunTotals":
        """Sums the records of earlier processes up to step `steps`; time counts up to the last record."""
        of_step: dict[float, Record] = {}
        totals = cls()
        for record in records:
            step = _known(record, "step")
            totals.wall_s = max(totals.wall_s, number(record, "time_s", 0.0))
            if record["kind"] == "step" and step <= steps:
                of_step[step] = record
            elif record["kind"] == "eval" and step <= steps:
                totals.evals.append({name: _known(record, name) for name in EVALS})
        for record in of_step.values():
            step_s = number(record, "step_s", 0.0)
            totals.trained_s += step_s
            totals.samples += step_s * number(record, "samples_per_s", 0.0)
        totals.rewards = [_known(of_step[step], "reward") for step in sorted(of_step)]
        totals.staleness_max = int(max((_known(record, "staleness_max") for record in of_step.values()), default=0))
        return totals


def _known(record: Record, name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else nan
