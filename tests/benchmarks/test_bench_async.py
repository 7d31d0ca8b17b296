"""`shoal bench async`: how fast the engine is while it is full, and that a bench ends with a reason."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import Report, figures_of
from benchmarks.asynchrony import _rate_while_full
from shoal.errors import ShoalError


class Watched:
    """An engine of which only is asked how many wait."""

    def __init__(self, waiting: list[int]) -> None:
        self.waiting, self.looks = waiting, 0
        self.done = asyncio.Event()

    async def info(self) -> SimpleNamespace:
        waiting = self.waiting[self.looks] if self.looks < len(self.waiting) else 0
        self.looks += 1
        if self.looks == len(self.waiting):
            self.done.set()
        return SimpleNamespace(waiting=waiting, tokens_drawn=100 * self.looks)


def rate(waiting: list[int]) -> tuple[float, int]:
    """The rate, and how often was looked."""

    async def main() -> tuple[float, int]:
        engine: Any = Watched(waiting)
        answering = [asyncio.create_task(engine.done.wait())]
        found = await _rate_while_full(engine, answering, asyncio.get_running_loop().time() - 1, 0)
        for task in answering:
            task.cancel()
        return found, engine.looks

    return asyncio.run(main())


def test_an_engine_that_no_request_has_reached_yet_is_looked_at_again() -> None:
    found, looks = rate([0, 0, 5, 3, 0, 0, 0])
    assert found > 0
    assert looks == 5


def test_an_engine_that_has_a_place_for_all_is_never_full() -> None:
    found, looks = rate([0, 0, 0])
    assert found == 0
    assert looks >= 3


def test_a_bench_that_breaks_ends_with_a_sentence_that_says_where() -> None:
    def broken(quick: bool) -> Report:
        try:
            raise ZeroDivisionError("float division by zero")
        except ZeroDivisionError as error:
            raise ExceptionGroup("of a TaskGroup", [error]) from None

    def refused(quick: bool) -> Report:
        raise ShoalError("a sentence")

    with pytest.raises(ShoalError, match=r"bench async: ended without figures: ZeroDivisionError: float division"):
        figures_of("async", broken, True)
    with pytest.raises(ShoalError, match=r"^a sentence$"):
        figures_of("async", refused, True)
