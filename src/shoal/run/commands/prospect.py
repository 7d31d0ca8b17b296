"""Prospect of a run: some groups of its tasks, answered and scored as in training, and whether they would teach it.

The groups pass the run's model, engine, sampling, agents, scorers and hooks. Nothing is trained, and no run directory
is written.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.interfaces import Environment, Runner
from shoal.reward.service import FULL
from shoal.rollout.orchestrator import Source
from shoal.rollout.reward_hooks import hooks_of, processed
from shoal.run.blocking import run_blocking
from shoal.run.learning import cut_remedy, distinct_answers, remedy, teaches, was_cut
from shoal.run.parts import answering
from shoal.run.prepare import Prepared, prepare_answering
from shoal.trainer.advantage import returns_of
from shoal.types import Group, Rollout, RolloutStatus

GROUPS = 31
"""Groups of each task at most: five rounds, each twice as large as the one before."""
WEAK = 0.25
"""Share of groups with signal below which a run learns slowly, so that settings are named."""
SLIGHT = 0.1
"""Mean difference of rewards within groups below which partial marks alone say little about the answer."""

Show = Callable[[str], None]
Returns = Callable[[Rollout], list[float]]


@dataclass(frozen=True, slots=True)
class Prospect:
    """Verdict on a run before it starts, with the figures of each task."""

    verdict: str
    learns: bool
    """False if no task has a group with signal."""
    tables: dict[str, object]
    """Figures of each task by its name, and under `set` what to set; empty where nothing needs it."""

    @property
    def values(self) -> dict[str, object]:
        """All of it as one JSON object."""
        return {"verdict": self.verdict, "learns": self.learns, "tasks": self.tables}


def prospect_of(config: Config, seconds: float, show: Show) -> Prospect:
    """Answers groups of a run's tasks for about `seconds`. Raises a `ShoalError`; `show` gets the progress."""
    if config.stages:
        raise ConfigError(
            "stages: expected a run whose model exists, got stages; write a separate configuration for one stage"
        )
    if config.train.teacher is not None:
        raise ConfigError("train.teacher: expected a run that learns from rewards, got one that its teacher teaches")
    show("checking model, tasks and rewards")
    with prepare_answering(config) as prepared:
        groups = run_blocking(_sampled(prepared, seconds, show))
    returns = returns_of(config.train, config.rollout.max_tokens)
    return judged(groups, returns, within_groups=config.train.compares_within_groups)


async def _sampled(prepared: Prepared, seconds: float, show: Show) -> dict[str, list[Group]]:
    """The groups that ended, by task: rounds for as long as another one is likely to end in time."""
    groups: dict[str, list[Group]] = {name: [] for name in prepared.environments}
    show("starting the engine")
    async with answering(prepared) as parts:
        began_s, first, size = time.monotonic(), 0, 1
        while True:
            round_began_s = time.monotonic()
            await _round(prepared, parts.runner, range(first, first + size), groups, began_s + seconds)
            now_s = time.monotonic()
            show(f"{sum(map(len, groups.values()))} groups in {now_s - began_s:.0f} s of at most {seconds:g} s")
            first, size = first + size, 2 * size
            if first >= GROUPS or now_s + 2 * (now_s - round_began_s) > began_s + seconds:
                return groups


async def _round(
    prepared: Prepared,
    runner: Runner,
    indices: Sequence[int],
    groups: dict[str, list[Group]],
    until_s: float,
) -> None:
    """Adds the groups of these questions of each task that end before `until_s`, a time of the monotonic clock."""
    config = prepared.config
    hooks = {task.name: hooks_of(task.name, task.reward) for task in config.tasks}

    async def one(environment: Environment, index: int) -> None:
        source = Source(environment, partial(runner.rollouts, n=config.rollout.group_size))
        task = await source.draw(index)
        group = Group(f"{source.name}-{index}", task, await source.rollouts(task), 0)
        groups[source.name].append(await processed(group, hooks.get(task.service, [])))

    try:
        async with asyncio.timeout(until_s - time.monotonic()), asyncio.TaskGroup() as answering:
            for index in indices:
                for environment in prepared.environments.values():
                    answering.create_task(one(environment, index))
    except TimeoutError:
        return


def judged(groups: Mapping[str, Sequence[Group]], returns: Returns, *, within_groups: bool) -> Prospect:
    """Judges groups by task, as training compares their returns. Pure."""

    def teaching_of(drawn: Sequence[Group]) -> list[Group]:
        usable = [group for group in drawn if group.usable]
        return [one for one in usable if teaches([one] if within_groups else usable, returns, within_groups)]

    taught = {name: teaching_of(drawn) for name, drawn in groups.items()}
    idle = {name: [group for group in drawn if group not in taught[name]] for name, drawn in groups.items()}
    tables = {name: _table(drawn, idle[name]) for name, drawn in groups.items()}
    count = sum(map(len, groups.values()))
    teaching = count - sum(map(len, idle.values()))
    shares = f"{teaching} of {count} groups have differing rewards"
    advice = "; ".join(f"{name}: {table['set']}" for name, table in tables.items() if table["set"])
    if not count:
        verdict = "nothing is known of this run"
    elif not teaching:
        verdict = f"this run learns nothing as it is: {shares}"
    else:
        weak = ", ".join(name for name, drawn in groups.items() if _is_weak(drawn, idle[name]))
        verdict = f"this run can learn{f', but hardly from {weak}' if weak else ''}: {shares}"
    return Prospect(f"{verdict}; {advice}" if advice else verdict, teaching > 0, {**tables})


def _table(groups: Sequence[Group], idle: Sequence[Group]) -> dict[str, object]:
    """Figures of one task's groups, of which the idle ones have no signal."""
    if not groups:
        return {"groups": 0, "set": "no group ended in time: set --seconds higher, or rollout.max_tokens lower"}
    every = [rollout for group in groups for rollout in group.rollouts]
    finished = [rollout for group in groups for rollout in group.finished]
    failures = Counter(rollout.reason for rollout in every if rollout.status is RolloutStatus.FAILED)
    unread = Counter(rollout.reward.unread for rollout in finished if rollout.reward.unread)
    shares: dict[str, list[float]] = {
        "reward": [rollout.reward.value for rollout in finished],
        "full_marks": [rollout.reward.value >= FULL for rollout in finished],
        "cut": [was_cut(rollout) for rollout in finished],
        "unread": [bool(rollout.reward.unread) for rollout in finished],
        "distinct_answers": [distinct_answers(group) for group in groups],
        "tokens": [rollout.sampled_tokens for rollout in finished],
    }
    return {
        "groups": len(groups),
        "signal": 1 - len(idle) / len(groups),
        "spread": _spread(groups),
        **{name: fmean(values) if values else None for name, values in shares.items()},
        "unread_reason": _commonest(unread),
        "failed": failures.total() / len(every),
        "failed_reason": _commonest(failures),
        "set": _advice(groups, idle),
    }


def _advice(groups: Sequence[Group], idle: Sequence[Group]) -> str:
    """Says what to set for a task, where it has too few groups with signal or too many cut answers."""
    if _is_weak(groups, idle):
        larger = ", or rollout.group_size higher" if len(idle) < len(groups) else ""
        return remedy(idle) + larger
    rollouts = [rollout for group in groups for rollout in group.finished]
    if _spread(groups) < SLIGHT and not any(one.reward.value >= FULL for one in rollouts):
        return f"no answer is right, and rewards differ by {_spread(groups):.2g} in a group: {remedy(groups)}"
    return cut_remedy(rollouts)


def _spread(groups: Sequence[Group]) -> float:
    """Mean difference between the best and the worst reward of a group."""
    marks = [[rollout.reward.value for rollout in group.finished] for group in groups if group.finished]
    return fmean(max(own) - min(own) for own in marks) if marks else 0.0


def _is_weak(groups: Sequence[Group], idle: Sequence[Group]) -> bool:
    return not groups or len(groups) - len(idle) < WEAK * len(groups)


def _commonest(reasons: Counter[str]) -> str:
    return next((reason for reason, _ in reasons.most_common(1)), "")
