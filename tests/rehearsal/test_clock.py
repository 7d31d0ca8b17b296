"""The virtual clock jumps over waiting, keeps order, and names a deadlock."""

import asyncio

import pytest

from shoal.rehearsal.clock import NothingCanHappen, run_virtual


def test_an_hour_of_sleeping_takes_no_time_and_ends_on_the_hour() -> None:
    async def nap() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run_virtual(nap()) == 3600


def test_sleepers_wake_in_the_order_of_their_alarms() -> None:
    async def dormitory() -> list[tuple[float, str]]:
        woken: list[tuple[float, str]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append((asyncio.get_running_loop().time(), name))

        await asyncio.gather(sleeper("late", 9), sleeper("early", 1), sleeper("twin", 9))
        return woken

    assert run_virtual(dormitory()) == [(1, "early"), (9, "late"), (9, "twin")]


def test_a_deadlock_is_an_error_that_says_who_waits_where() -> None:
    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingCanHappen, match="stuck"):
        run_virtual(stuck())


def test_a_timeout_fires_at_its_moment() -> None:
    async def impatient() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert run_virtual(impatient()) == 7
