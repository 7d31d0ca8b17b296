"""Plain functions of the user: what they raise arrives, and one that hangs holds up nothing."""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shoal.plugins import MOST_THREADS, in_thread
from shoal.rollout.reward_hooks import processed
from shoal.tasks.sdk import Definition, Question
from shoal.types import Group, Reward, RewardStatus, Rollout, RolloutStatus, Split, Task

ASKED = Task("t", "own", ())


def stops() -> float:
    return next(iter([]))


def leaves() -> float:
    sys.exit("no such file")


def interrupts() -> float:
    raise KeyboardInterrupt


def divides() -> float:
    return 1 / 0


def cancels() -> float:
    raise asyncio.CancelledError


def closes() -> float:
    raise GeneratorExit


def fails() -> float:
    pytest.fail("not right")


RAISING = [stops, leaves, divides]
RAISING_PLAINLY = [*RAISING, interrupts, cancels, closes, fails]
"""From a coroutine the further ones have a meaning for the event loop."""


class Own:
    """An environment whose methods raise."""

    def __init__(self, raises: Callable[[], float]) -> None:
        self.raises = raises

    def draw(self, rng: Any) -> Question:
        self.raises()
        return Question("?")

    def rollout(self, task: Task, model: object) -> float:
        return self.raises()

    def score(self, task: Task, answer: str) -> float:
        return self.raises()


class Together(Own):
    """The same with one call for a group."""

    def scores(self, task: Task, answers: Any) -> list[float]:
        return [self.raises()]


class Awaited:
    """The same with coroutines."""

    def __init__(self, raises: Callable[[], float]) -> None:
        self.raises = raises

    def draw(self, rng: Any) -> Question:
        return Question("?")

    async def rollout(self, task: Task, model: object) -> float:
        return self.raises()

    async def score(self, task: Task, answer: str) -> float:
        return self.raises()


async def within(doing: Awaitable[Any]) -> Any:
    async with asyncio.timeout(60):
        return await doing


@pytest.mark.parametrize(
    ("kind", "raises"),
    [*((kind, raises) for kind in (Own, Together) for raises in RAISING_PLAINLY), *((Awaited, one) for one in RAISING)],
)
def test_whatever_an_author_s_method_raises_is_the_failure_of_its_call(
    kind: Callable[[Callable[[], float]], object], raises: Callable[[], float]
) -> None:
    served = Definition("own", kind(raises))

    async def main() -> None:
        (reward,) = await within(served.score(ASKED, ["?"]))
        assert reward.status is RewardStatus.FAILED
        with pytest.raises(Exception, match=r".") as rolled:
            await within(served.rollout(ASKED, None))  # type: ignore[arg-type]
        assert not isinstance(rolled.value, TimeoutError)
        if kind is not Awaited:
            with pytest.raises(Exception, match=r".") as drawn:
                await within(served.drawn(Split.TRAIN, 0))
            assert not isinstance(drawn.value, TimeoutError)

    asyncio.run(main())


@pytest.mark.parametrize("raises", RAISING)
def test_whatever_a_hook_raises_is_the_failure_of_its_group(raises: Callable[[], float]) -> None:
    def hook(group: Group) -> Group:
        raises()
        return group

    group = Group("g", ASKED, (Rollout("r", (), (), Reward(1.0)),), 0)
    assert asyncio.run(processed(group, [hook])).rollouts[0].status is RolloutStatus.FAILED


def test_functions_that_hang_hold_up_neither_other_threads_nor_the_end() -> None:
    ended, finished = threading.Event(), list[int]()

    def hangs() -> None:
        ended.wait(60)
        finished.append(1)

    async def main() -> None:
        calls = [asyncio.create_task(in_thread(hangs)) for _ in range(64)]
        await asyncio.sleep(0)
        assert await asyncio.to_thread(int) == 0
        for call in calls:
            call.cancel()

    asyncio.run(main())
    assert finished == []
    ended.set()


def test_more_calls_than_threads_wait_for_one_that_ends() -> None:
    ended = threading.Event()

    async def main() -> None:
        calls = [asyncio.create_task(in_thread(ended.wait, 60)) for _ in range(MOST_THREADS)]
        await asyncio.sleep(0)
        further = [asyncio.create_task(in_thread(ended.is_set)) for _ in range(3)]
        await asyncio.sleep(0)
        further[0].cancel()
        ended.set()
        assert await asyncio.gather(*calls, *further[1:]) == [True] * (MOST_THREADS + 2)
        assert further[0].cancelled()

    asyncio.run(main())
