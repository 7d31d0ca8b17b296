"""The result of a run and of its steps: figures, and sums over the steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf, nan
from pathlib import Path
from statistics import fmean

from shoal.experience.buffer import STALE, Buffer
from shoal.interfaces import Scorer
from shoal.observe.metrics import Record, number
from shoal.reward.service import FULL, BinaryScorer, RewardService
from shoal.run.dynamic_sampling import UNINFORMATIVE
from shoal.tasks.remote_environment import EnvironmentScorer
from shoal.trainer.messages import RATIO_BOUNDS, STATS_MEANINGS, StepStats
from shoal.types import Group

EVALS = ("sampled", "greedy", "sampled_reward", "greedy_reward")
RATIO_BINS = [f"{low:g}-{high:g}" for low, high in pairwise((0.0, *RATIO_BOUNDS, inf))]


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
    """Seconds of all processes that the run had."""
    steps: int
    samples_per_s: float
    """Rollouts that steps consumed, per second of training."""
    staleness_max: int
    parity: float
    run_dir: Path
    warning: str
    """Reason why the run may have learned nothing; empty without a sign of it."""

    @property
    def model(self) -> Path:
        """Path of the trained model, a Hugging Face directory."""
        return self.run_dir / "model"

    @property
    def figures(self) -> dict[str, object]:
        """Values that JSON knows, by name."""
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


def stats_values(stats: StepStats) -> dict[str, float]:
    """Metrics of the trainer's part of a step."""
    measured = asdict(stats)
    return {
        **{name: measured[name] for name in STATS_MEANINGS if measured[name] is not None},
        **{f"ratio_share/{name}": share for name, share in zip(RATIO_BINS, stats.ratio_shares, strict=True)},
    }


def scorer_values(scorer: Scorer) -> Mapping[str, float]:
    """Figures of the run's own scorer; empty for any other."""
    inner = scorer.scorer if isinstance(scorer, BinaryScorer) else scorer
    inner = inner.others if isinstance(inner, EnvironmentScorer) else inner
    return inner.values if isinstance(inner, RewardService) else {}


def lost_groups(buffer: Buffer) -> dict[str, int]:
    """Groups lost so far, and the tokens of those, by cause."""
    counts, wasted = buffer.counts, buffer.wasted_tokens
    return {
        "wasted_tokens": wasted.total(),
        **{f"wasted_tokens/{name}": count for name, count in wasted.items()},
        **{f"dropped_late/{name}": task.dropped[STALE] for name, task in counts.items()},
        "dropped_late": sum(task.dropped[STALE] for task in counts.values()),
        "redrawn": sum(task.dropped[UNINFORMATIVE] for task in counts.values()),
        "failed": sum(task.failed.total() for task in counts.values()),
    }


def task_values(groups: Sequence[Group], elapsed_s: float) -> dict[str, float]:
    """Metrics of a step's groups by task."""
    values: dict[str, float] = {}
    for name in dict.fromkeys(group.task.service for group in groups):
        finished = [rollout for group in groups if group.task.service == name for rollout in group.finished]
        values[f"reward/{name}"] = fmean(rollout.reward.value for rollout in finished)
        values[f"solve_rate/{name}"] = fmean(rollout.reward.value >= FULL for rollout in finished)
        values[f"tokens_per_s/{name}"] = sum(rollout.sampled_tokens for rollout in finished) / elapsed_s
    return values
