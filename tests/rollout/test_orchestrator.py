"""The real orchestrator and the real buffer on a virtual clock: shares, failures, deaths, no losses."""

import asyncio
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_values import META, open_buffer
from buffer_values import group as made_group
from shoal.experience.balance import PATIENCE_S
from shoal.experience.buffer import Buffer
from shoal.experience.schema import RunMeta
from shoal.rehearsal.clock import run_virtual
from shoal.rollout.mixture_weights import Adjuster
from shoal.rollout.orchestrator import CANCELLED, INTERRUPTED, Orchestrator
from shoal.types import Completion, FinishReason, Sampling, Task
from until import until

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
    health: None = None
    lucky: int = 0
    """Groups that end well before others fail."""
    dies_s: float = math.inf
    """From when on its rollouts hang, until the service is given up."""

    def groups_at_once(self) -> int | None:
        return self.max_running

    async def draw(self, index: int) -> Task:
        await asyncio.sleep(self.draw_s)
        return Task(f"{self.name}/{index}", self.name, ())

    async def rollouts(self, task: Task, turns: object = None):
        """Two rollouts at the buffer's version; all of them failed when the service does, or is away when they end."""
        assert self.buffer is not None
        version = self.buffer.gate.version
        now_s = asyncio.get_running_loop().time()
        hangs = now_s >= self.dies_s and self.away is not None and now_s < self.away[0]
        await asyncio.sleep(self.away[0] - now_s if hangs else self.seconds * self.dice.uniform(0.5, 1.5))
        self.lucky -= 1
        failed = GROUP_SIZE if self.lucky < 0 and (self.dice.random() < self.failing or self._is_away()) else 0
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
    changes: list[dict[str, object]]
    shares: dict[str, float]
    per_step: list[Counter[str]]
    ends_s: list[float]
    """When each step was done."""
    failed: dict[str, Counter[str]]
    """Groups by reason."""


def simulate(
    shops,
    weights,
    *,
    steps,
    max_staleness=4,
    per_step=6,
    step_s=1.0,
    max_running=200,
    bounds=None,
    tokens=False,
    late="train",
) -> Run:
    """Trains `steps` steps of groups from the workshops; each away workshop is announced to the orchestrator."""

    async def main() -> Run:
        buffer = Buffer.in_memory(RunMeta(max_staleness, late, per_step, 1), max_running=max_running)
        changes: list[dict[str, object]] = []
        shares = {shop.name: weight for shop, weight in zip(shops, weights, strict=True)}
        adjuster = Adjuster(shares, bounds) if bounds or tokens else None
        orchestrator = Orchestrator(shops, shares, buffer, adjuster=adjuster, on_event=noted("ratio", changes))
        trained: list[Counter[str]] = []
        ends_s: list[float] = []
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
                buffer.on_loaded(step + 1)
                trained.append(Counter(one.task.service for one in groups))
                ids += [one.id for one in groups]
                ends_s.append(asyncio.get_running_loop().time())
            for task in background:
                task.cancel()
        counts = buffer.counts.values()
        accounted = sum(c.finished + c.failed.total() + c.dropped.total() + c.in_flight for c in counts)
        total = sum(trained, Counter())
        started = sum(c.started for c in counts)
        failed = {name: c.failed for name, c in buffer.counts.items()}
        newest = adjuster.weights if adjuster else shares
        last = {name: weight / sum(newest.values()) for name, weight in newest.items()}
        return Run(total, ids, started, accounted, changes, last, trained, ends_s, failed)

    return run_virtual(main())


def noted(wanted: str, into: list[dict[str, object]]):
    """Notes the details of one kind of event."""
    return lambda name, **details: into.append(details) if name == wanted else None


async def absences(orchestrator: Orchestrator, shop: Workshop) -> None:
    assert shop.away is not None
    await asyncio.sleep(shop.away[0])
    orchestrator.presence(shop.name, False)
    await asyncio.sleep(shop.away[1] - shop.away[0])
    orchestrator.presence(shop.name, True)


def off_target(run: Run, weights: dict[str, float]) -> float:
    """By how many groups a task was ever off what it should have had trained by then."""
    trained, worst = Counter[str](), 0.0
    for step in run.per_step:
        trained.update(step)
        due = {name: weight / sum(weights.values()) * trained.total() for name, weight in weights.items()}
        worst = max(worst, *(abs(trained[name] - due[name]) for name in due))
    return worst


@pytest.mark.parametrize("late", ["drop", "train"])
@pytest.mark.parametrize("step_s", [0.0, 2.0])
def test_a_fast_a_slow_and_a_flaky_task_are_trained_in_equal_parts_at_every_step(late: str, step_s: float) -> None:
    shops = [Workshop("fast", 0.5), Workshop("slow", 10.0), Workshop("flaky", 0.5, failing=0.3)]
    run = simulate(shops, (1, 1, 1), steps=50, step_s=step_s, late=late)
    assert run.trained.total() == 300
    assert off_target(run, {"fast": 1, "slow": 1, "flaky": 1}) == 0


def test_once_a_task_has_left_the_others_are_trained_in_equal_parts_at_every_step() -> None:
    shops = [Workshop("fast", 0.5), Workshop("slow", 10.0), Workshop("leaver", 1.0, away=(5.0, 1e9))]
    run = simulate(shops, (1, 1, 1), steps=30)
    assert run.per_step[15:] == [Counter(fast=3, slow=3)] * 15


def test_a_task_that_falls_silent_unnoticed_is_waited_for_once_and_holds_up_nobody_after_it_is_given_up() -> None:
    shops = [Workshop("good", 1.0), Workshop("dead", 1.0, dies_s=20.0, away=(90.0, 1e9))]
    run = simulate(shops, (1, 1), steps=60, max_staleness=2)
    assert run.trained.total() == 360
    assert run.ends_s[-1] < 60 + (90 - 20) + 5, "nothing was waited for but the dead task, until it was given up"
    waits = [after - before for before, after in pairwise(run.ends_s)]
    assert sorted(waits)[-3] < 3, "once for its silence, once when nothing else may start before it is given up"


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
def test_whatever_the_speeds_and_failures_shares_are_met_and_nothing_is_lost_or_doubled(
    kinds, max_staleness, seed
) -> None:
    shops = [
        Workshop(f"s{i}", seconds, failing, draw_s=draw_s, dice=random.Random(seed + i), lucky=1)
        for i, (seconds, failing, _, draw_s) in enumerate(kinds)
    ]
    weights = {shop.name: kind[2] for shop, kind in zip(shops, kinds, strict=True)}
    steps, per_step = 60, 6
    run = simulate(shops, weights.values(), steps=steps, max_staleness=max_staleness, per_step=per_step)
    assert len(set(run.ids)) == len(run.ids) == steps * per_step
    assert run.started == run.accounted
    ahead = (max_staleness + 1) * per_step + len(shops)
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        assert abs(run.trained[name] - share * steps * per_step) <= ahead, (name, run.trained)
    if all(1.5 * seconds + draw_s < PATIENCE_S and not failing for seconds, failing, _, draw_s in kinds):
        assert off_target(run, weights) <= len(shops), "nobody was silent, so every step was waited for"


def test_while_a_task_is_away_the_others_go_on_and_afterwards_it_gets_back_what_it_missed_within_bounds() -> None:
    shops = [Workshop("steady", 1.0), Workshop("leaver", 1.0, away=(20.0, 60.0))]
    run = simulate(shops, (1, 1), steps=200, per_step=6, max_staleness=2)
    away = sum(run.per_step[22:60], Counter())
    assert away["leaver"] <= 3 * 6, "groups that were waiting may still be trained, no others"
    after = sum(run.per_step[60:67], Counter())
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
    run = simulate(shops, (1, 1, 1), steps=150, bounds=(0.1, 4.0))
    late = sum(run.per_step[100:], Counter())
    assert late["learnable"] > 0.8 * late.total()
    assert 0 < late["mastered"] < 0.1 * late.total()
    assert run.changes
    assert all(change["reason"] for change in run.changes)


def test_a_task_that_cannot_deliver_its_share_at_full_concurrency_is_asked_for_less() -> None:
    shops = [Workshop("quick", 1.0), Workshop("crawling", 20.0, max_running=2)]
    run = simulate(shops, (1, 1), steps=200, bounds=(0.05, 4.0))
    assert run.shares["crawling"] < 0.3
    assert any("waited for it" in change["reason"] for change in run.changes)


def test_shares_of_tokens_are_met_when_one_task_says_four_times_as_much() -> None:
    shops = [Workshop("brief", 1.0), Workshop("wordy", 1.0, times=4)]
    run = simulate(shops, (1, 1), steps=200, tokens=True)
    late = sum(run.per_step[60:], Counter())
    assert abs(late["brief"] / late["wordy"] - 4) < 0.6
    assert "tokens per group" in run.changes[0]["reason"]


def test_a_source_that_can_run_more_says_so_and_is_asked_at_once() -> None:
    shop = Workshop("grows", 1000.0, max_running=1)

    async def main() -> list[int]:
        shop.buffer = buffer = Buffer.in_memory(RunMeta(4, "train", 6, 1), max_running=200)
        orchestrator = Orchestrator([shop], {"grows": 1.0}, buffer)
        running = asyncio.create_task(orchestrator.run())
        seen = []
        for most in (1, 3):
            shop.max_running = most
            orchestrator.wake()
            await asyncio.sleep(1.0)
            seen.append(buffer.counts["grows"].in_flight)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return seen

    assert run_virtual(main()) == [1, 3]


@dataclass
class Endless(Workshop):
    """A workshop whose groups never end; it remembers the indices that are drawn."""

    drawn: list[int] = field(default_factory=list)

    async def draw(self, index: int) -> Task:
        self.drawn.append(index)
        return await super().draw(index)

    async def rollouts(self, task: Task, turns: object = None):
        await asyncio.Event().wait()


def test_a_resumed_run_continues_with_the_questions_after_those_that_were_in_flight(tmp_path: Path) -> None:
    async def drawn(*, resume: bool, started: int) -> list[int]:
        buffer = open_buffer(tmp_path, META, max_running=2, resume=resume)
        shop = Endless("gsm", 1.0, buffer=buffer)
        running = asyncio.create_task(Orchestrator([shop], {"gsm": 1.0}, buffer).run())
        await until(lambda: buffer.counts["gsm"].started == started and len(shop.drawn) == 4)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await buffer.close()
        return shop.drawn

    assert asyncio.run(drawn(resume=False, started=2)) == [0, 1, 2, 3]
    assert asyncio.run(drawn(resume=True, started=4)) == [2, 3, 4, 5]


class Cancelling(Workshop):
    """A workshop whose first groups end because something that they wait for is cancelled."""

    async def rollouts(self, task: Task, turns: object = None):
        if int(task.id.rpartition("/")[2]) < 3:
            lost = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(1.0, lost.cancel)
            await lost
        return await super().rollouts(task, turns)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_group_whose_scoring_is_cancelled_fails_and_gives_its_place_back(max_staleness: int) -> None:
    run = simulate([Cancelling("flaky", 1.0)], (1,), steps=20, max_staleness=max_staleness, per_step=6)
    assert run.trained.total() == 120
    assert run.started == run.accounted
    assert run.failed["flaky"] == Counter({CANCELLED: 3})


def test_each_reason_of_a_failed_rollout_is_told_once() -> None:
    told: list[dict[str, object]] = []

    async def main() -> None:
        buffer = Buffer.in_memory(RunMeta(4, "train", 6, 1), max_running=20)
        shop = Workshop("flaky", 1.0, failing=0.3, buffer=buffer)
        orchestrator = Orchestrator([shop], {"flaky": 1.0}, buffer, on_event=noted("rollout_failed", told))
        running = asyncio.create_task(orchestrator.run())
        for step in range(20):
            groups = await buffer.take(6, step)
            await buffer.consumed(step, step, [one.id for one in groups], version_after=step + 1)
            buffer.on_loaded(step + 1)
        running.cancel()

    run_virtual(main())
    assert told == [{"reason": "no answer"}]


def test_a_run_whose_first_groups_fail_for_one_reason_ends_with_it_at_once() -> None:
    async def main() -> None:
        buffer = Buffer.in_memory(RunMeta(4, "train", 6, 1), max_running=20)
        shop = Workshop("broken", 1.0, failing=1.0, buffer=buffer)
        await Orchestrator([shop], {"broken": 1.0}, buffer).run()

    with pytest.raises(ExceptionGroup) as raised:
        run_virtual(main())
    assert "of the first 8 groups, all for one reason: no answer" in str(raised.value.exceptions[0])


def test_a_run_of_which_no_later_group_can_be_used_ends_with_the_reason() -> None:
    told: list[dict[str, object]] = []

    async def main() -> None:
        buffer = Buffer.in_memory(RunMeta(4, "train", 6, 1), max_running=20)
        shop = Workshop("broken", 1.0, failing=1.0, lucky=1, buffer=buffer)
        async with asyncio.timeout(3600):
            await Orchestrator([shop], {"broken": 1.0}, buffer, on_event=noted("groups_unusable", told)).run()

    with pytest.raises(ExceptionGroup) as raised:
        run_virtual(main())
    assert "256 in a row that cannot be used; most often: " in str(raised.value.exceptions[0])
    assert len(told) == 1


async def test_a_group_of_a_task_that_the_resumed_run_no_longer_has_ends(tmp_path: Path) -> None:
    buffer, task = open_buffer(tmp_path, META), Task("gone/0", "gone", ())
    await buffer.admit("gone-0", "gone")
    turns = await buffer.turns("gone-0", task)
    turns.of(0).keep((5, 6), Sampling(4), Completion((1,), (-0.5,), (0,), FinishReason.STOP))
    await buffer.close()
    buffer = open_buffer(tmp_path, META, resume=True)
    shop = Workshop("stays", 1000.0, buffer=buffer, max_running=1)
    running = asyncio.create_task(Orchestrator([shop], {"stays": 1.0}, buffer).run())
    await until(lambda: running.done() or buffer.counts["gone"].failed.total() > 0)
    assert buffer.counts["gone"].failed == {INTERRUPTED: 1}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await buffer.close()
