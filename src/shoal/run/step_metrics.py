"""Metrics of one step: times, shares and counts since the step before."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf
from statistics import fmean

from shoal.experience.buffer import STALE, Buffer
from shoal.interfaces import Scorer
from shoal.reward.service import FULL, BinaryScorer, RewardService
from shoal.run.engine_watch import EngineWatch
from shoal.run.learning import UNINFORMATIVE, was_cut
from shoal.run.result import RunTotals
from shoal.tasks.remote_environment import EnvironmentScorer
from shoal.trainer.advantage import is_informative
from shoal.trainer.messages import RATIO_BOUNDS, STATS_MEANINGS, StepStats
from shoal.types import Group, Rollout

RATIO_BINS = [f"{low:g}-{high:g}" for low, high in pairwise((0.0, *RATIO_BOUNDS, inf))]
WAITS = ("groups_wait_s", "train_s", "write_s", "save_s")


@dataclass(slots=True)
class StepMetrics:
    """Metrics of the step under way; adds each step to the run's totals."""

    buffer: Buffer
    scorer: Scorer
    watch: EngineWatch
    returns: Callable[[Rollout], list[float]]
    totals: RunTotals
    clock: Callable[[], float] = time.monotonic
    busy_s: float = 0.0
    """Seconds in which the trainer computed."""
    _waited_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _began_s: float = field(init=False)
    _lost: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._began_s, self._lost = self.clock(), _lost_groups(self.buffer)

    def begin(self) -> None:
        """Begins the next step now."""
        self.busy_s, self._began_s = 0.0, self.clock()
        self._waited_s.clear()
        self.watch.clear()

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Counts the seconds of a block under one of `WAITS`."""
        began_s = self.clock()
        yield
        self._waited_s[name] += self.clock() - began_s

    def stepped(
        self, version: int, groups: Sequence[Group], stats: StepStats, late_tokens: Counter[str], load_s: float
    ) -> dict[str, float]:
        """Metrics of the step that ends now, on own groups. Rates and shares cover the time since the step before."""
        elapsed_s = self.clock() - self._began_s
        finished = [rollout for group in groups for rollout in group.finished]
        staleness = [version - group.oldest_version for group in groups]
        reward = fmean(rollout.reward.value for rollout in finished)
        totals = self.totals
        totals.samples += len(finished)
        totals.staleness_max = max(totals.staleness_max, *staleness)
        totals.rewards.append(reward)
        lost_before, self._lost = self._lost, _lost_groups(self.buffer)
        values = {
            "version": version,
            "reward": reward,
            **_task_values(groups, elapsed_s),
            "staleness_mean": fmean(staleness),
            "staleness_max": max(staleness),
            "tokens_per_s": sum(rollout.sampled_tokens for rollout in finished) / elapsed_s,
            "samples_per_s": len(finished) / elapsed_s,
            "step_s": elapsed_s,
            "engine_busy": self.watch.busy_share,
            "trainer_busy": min(1.0, self.busy_s / elapsed_s),
            **{f"staleness/{k}": staleness.count(k) for k in range(totals.staleness_max + 1)},
            **stats_values(stats),
            "informative_share": fmean(is_informative(group, self.returns) for group in groups),
            "length_mean": fmean(rollout.sampled_tokens for rollout in finished),
            "late_tokens": late_tokens.total(),
            **{f"late_tokens/{name}": count for name, count in late_tokens.items()},
            "cut_share": fmean(was_cut(rollout) for rollout in finished),
            "waiting": self.buffer.waiting,
            **_question_counts(self.buffer),
            **{name: self._waited_s[name] for name in WAITS},
            "load_s": load_s,
            "gate_closed": self.watch.held_back_share,
            **_scorer_values(self.scorer),
            **{name: count - lost_before.get(name, 0) for name, count in self._lost.items()},
        }
        self.begin()
        return values


def stats_values(stats: StepStats) -> dict[str, float]:
    """Metrics of the trainer's part of a step."""
    measured = asdict(stats)
    return {
        **{name: measured[name] for name in STATS_MEANINGS if measured[name] is not None},
        **{f"ratio_share/{name}": share for name, share in zip(RATIO_BINS, stats.ratio_shares, strict=True)},
    }


def _scorer_values(scorer: Scorer) -> Mapping[str, float]:
    """Figures of the run's own scorer; empty for any other."""
    inner = scorer.scorer if isinstance(scorer, BinaryScorer) else scorer
    inner = inner.others if isinstance(inner, EnvironmentScorer) else inner
    return inner.values if isinstance(inner, RewardService) else {}


def _question_counts(buffer: Buffer) -> dict[str, float]:
    """Questions of the pools, by what their answers tell."""
    total = Counter[str]()
    for follower in buffer.followers.values():
        total.update(follower.counts())
    return {f"questions/{kind}": count for kind, count in total.items()}


def _lost_groups(buffer: Buffer) -> dict[str, int]:
    """Groups lost so far and their tokens, by cause."""
    counts, wasted = buffer.counts, buffer.wasted_tokens
    return {
        "wasted_tokens": wasted.total(),
        **{f"wasted_tokens/{name}": count for name, count in wasted.items()},
        **{f"dropped_late/{name}": task.dropped[STALE] for name, task in counts.items()},
        "dropped_late": sum(task.dropped[STALE] for task in counts.values()),
        "redrawn": sum(task.dropped[UNINFORMATIVE] for task in counts.values()),
        "failed": sum(task.failed.total() for task in counts.values()),
    }


def _task_values(groups: Sequence[Group], elapsed_s: float) -> dict[str, float]:
    """Metrics of a step's groups by task."""
    values: dict[str, float] = {}
    for name in dict.fromkeys(group.task.service for group in groups):
        finished = [rollout for group in groups if group.task.service == name for rollout in group.finished]
        values[f"reward/{name}"] = fmean(rollout.reward.value for rollout in finished)
        values[f"solve_rate/{name}"] = fmean(rollout.reward.value >= FULL for rollout in finished)
        values[f"tokens_per_s/{name}"] = sum(rollout.sampled_tokens for rollout in finished) / elapsed_s
    return values
