"""The real orchestrator and the real buffer on a virtual clock: shares, failures, deaths, no losses."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_values import group as made_group
from shoal.buffer import Buffer, RunMeta
from shoal.clock import run_virtual
from shoal.tasks.adjust import Bounds, Change
from shoal.tasks.orchestrator import Adjustment, Orchestrator, Terms
from shoal.types import Task

GROUP_SIZE = 2


@dataclass
class Workshop:
    """A task service of given speed and reliability, which can be away for a while."""

    name: str
    seconds: float
    failing: float = 0.0
    away: tuple[float, float] | None = None
    informative: float = 1.0
    draw_s: float = 0.0
    times: int = 1
    """How often each of a rollout's turns is drawn."""
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    buffer: Buffer | None = None
    max_running: int | None = None

    async def draw(self, index: int) -> Task:
        await asyncio.sleep(self.draw_s)
        return Task(f"{self.name}/{index}", self.name, ())

    async def rollouts(self, task: Task):
        """Two rollouts at the buffer's version; all of them failed when the service does, or is away when they end."""
        assert self.buffer is not None
        version = self.buffer.gate.version
        await asyncio.sleep(self.seconds * self.dice.uniform(0.5, 1.5))
        failed = GROUP_SIZE if self.dice.random() < self.failing or self._is_away() else 0
        drawn = made_group(task.id, (version, version), service=self.name, size=GROUP_SIZE, failed=failed).rollouts
        rewards = (1.0, 0.0 if self.dice.random() < self.informative else 1.0)
        return tuple(
            type(one)(one.id, one.messages, one.turns * self.times, type(one.reward)(value), one.status, one.reason)
            for one, value in zip(drawn, rewards, strict=True)
        )

    def _is_away(self) -> bool:
        now = asyncio.get_running_loop().time()
        return self.away is not None and self.away[0] <= now < self.away[1]


@dataclass
class Run:
    """What a simulated run came to."""

    trained: Counter[str]
    ids: list[str]
    started: int
    accounted: int
    changes: list[Change]
    shares: dict[str, float]
    per_step: list[Counter[str]]


def simulate(
    shops, weights, *, steps, eta=4, per_step=6, step_s=1.0, max_running=200, limits=None, bounds=None, tokens=False
) -> Run:
    """Trains `steps` steps of groups from the workshops; each away workshop is announced to the orchestrator."""

    async def main() -> Run:
        buffer = Buffer.in_memory(RunMeta(eta, "train", per_step, 1), max_running=max_running)
        changes: list[Change] = []
        adjustment = Adjustment(bounds, changes.append) if bounds or tokens else None
        terms = {
            shop.name: Terms(weight, (limits or {}).get(shop.name)) for shop, weight in zip(shops, weights, strict=True)
        }
        orchestrator = Orchestrator(shops, terms, buffer, adjustment=adjustment)
        trained: list[Counter[str]] = []
        ids: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(orchestrator.run(), name="orchestrator")]
            for shop in shops:
                shop.buffer = buffer
                if shop.away is not None:
                    background.append(tasks.create_task(absences(orchestrator, shop), name=f"absence of {shop.name}"))
            for step in range(steps):
                groups = await buffer.take(per_step, step)
                await asyncio.sleep(step_s)
                await buffer.consumed(step, step, [one.id for one in groups], version_after=step + 1)
                buffer.publish(step + 1)
                trained.append(Counter(one.task.service for one in groups))
                ids += [one.id for one in groups]
            for task in background:
                task.cancel()
        counts = buffer.counts.values()
        accounted = sum(c.finished + c.failed.total() + c.dropped.total() + c.in_flight for c in counts)
        total = sum(trained, Counter())
        started = sum(c.started for c in counts)
        return Run(total, ids, started, accounted, changes, orchestrator.shares, trained)

    return run_virtual(main())


async def absences(orchestrator: Orchestrator, shop: Workshop) -> None:
    assert shop.away is not None
    await asyncio.sleep(shop.away[0])
    orchestrator.leave(shop.name)
    await asyncio.sleep(shop.away[1] - shop.away[0])
    orchestrator.come(shop.name)


def off_target(run: Run, weights: dict[str, float]) -> float:
    """The largest difference between a share of the trained groups and its target."""
    return max(abs(run.trained[n] / run.trained.total() - w / sum(weights.values())) for n, w in weights.items())


def test_a_fast_a_slow_and_a_flaky_task_are_trained_in_equal_parts() -> None:
    shops = [Workshop("fast", 1.0), Workshop("slow", 20.0), Workshop("flaky", 1.0, failing=0.3)]
    run = simulate(shops, (1, 1, 1), steps=50)
    assert run.trained.total() == 300
    assert off_target(run, {"fast": 1, "slow": 1, "flaky": 1}) < 0.05


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.1, 30), st.sampled_from([0.0, 0.3, 0.6]), st.integers(1, 5), st.floats(0, 2)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 6),
    st.integers(0, 2**32),
)
def test_whatever_the_speeds_and_failures_shares_are_met_and_nothing_is_lost_or_doubled(kinds, eta, seed) -> None:
    shops = [
        Workshop(f"s{i}", seconds, failing, draw_s=draw_s, dice=random.Random(seed + i))
        for i, (seconds, failing, _, draw_s) in enumerate(kinds)
    ]
    weights = {shop.name: kind[2] for shop, kind in zip(shops, kinds, strict=True)}
    steps, per_step = 60, 6
    run = simulate(shops, weights.values(), steps=steps, eta=eta, per_step=per_step)
    assert len(set(run.ids)) == len(run.ids) == steps * per_step
    assert run.started == run.accounted
    ahead = (eta + 1) * per_step + len(shops)
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        assert abs(run.trained[name] - share * steps * per_step) <= ahead, (name, run.trained)


def test_while_a_task_is_away_the_others_go_on_and_afterwards_it_gets_back_what_it_missed_within_bounds() -> None:
    shops = [Workshop("steady", 1.0), Workshop("leaver", 1.0, away=(20.0, 60.0))]
    run = simulate(shops, (1, 1), steps=200, per_step=6, eta=2)
    away = sum(run.per_step[30:55], Counter())
    assert away["leaver"] <= 3 * 6, "groups that were waiting may still be trained, no others"
    after = sum(run.per_step[54:60], Counter())
    assert after["leaver"] > after["steady"], "the task that was away catches up"
    later = sum(run.per_step[120:], Counter())
    assert abs(later["leaver"] - later["steady"]) <= 6


def test_a_task_that_hangs_for_ever_when_drawing_holds_up_nobody_once_it_is_given_up() -> None:
    shops = [Workshop("good", 1.0), Workshop("hung", 1.0, draw_s=1e9, away=(30.0, 1e9))]
    run = simulate(shops, (1, 1), steps=40)
    assert run.trained == Counter(good=240)


def test_a_mastered_and_a_hopeless_task_shrink_to_the_floor_and_the_learnable_one_grows() -> None:
    shops = [
        Workshop("mastered", 1.0, informative=0.0),
        Workshop("hopeless", 1.0, informative=0.0),
        Workshop("learnable", 1.0, informative=0.8),
    ]
    run = simulate(shops, (1, 1, 1), steps=150, bounds=Bounds(0.1, 4.0))
    late = sum(run.per_step[100:], Counter())
    assert late["learnable"] > 0.8 * late.total()
    assert 0 < late["mastered"] < 0.1 * late.total()
    assert run.changes
    assert all(change.reason for change in run.changes)


def test_a_task_that_cannot_deliver_its_share_at_full_concurrency_is_asked_for_less() -> None:
    shops = [Workshop("quick", 1.0), Workshop("crawling", 20.0)]
    run = simulate(shops, (1, 1), steps=200, limits={"crawling": 2}, bounds=Bounds(0.05, 4.0))
    assert run.shares["crawling"] < 0.3
    assert any("waited for it" in change.reason for change in run.changes)


def test_shares_of_tokens_are_met_when_one_task_says_four_times_as_much() -> None:
    shops = [Workshop("brief", 1.0), Workshop("wordy", 1.0, times=4)]
    run = simulate(shops, (1, 1), steps=200, tokens=True)
    late = sum(run.per_step[60:], Counter())
    assert abs(late["brief"] / late["wordy"] - 4) < 0.6
    assert "tokens per group" in run.changes[0].reason
