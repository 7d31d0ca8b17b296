"""Child processes: what is told of one that ends or hangs, and that none is waited for without a bound."""

import asyncio
import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from cancelled import LOOPS, Loop, left_by, own_children
from shoal.errors import ChildDied
from shoal.net.process import Child
from shoal.trainer.worker import TrainerProcess, local_ranks
from until import until

ECHO = """
import socket, sys
from shoal.net.process import die_with_parent, serve
die_with_parent()
serve(socket.socket(fileno=int(sys.argv[-1])), lambda frame: [frame])
"""
LATER = """
import socket, sys
from concurrent.futures import Future
from shoal.net.process import die_with_parent, serve
die_with_parent()
later = Future()
def answers(frame):
    if frame == b"now":
        later.set_result(b"later")
    return [later if frame == b"when?" else frame]
serve(socket.socket(fileno=int(sys.argv[-1])), answers)
"""
DEAF = """
import os, signal, sys
from shoal.net.process import die_with_parent
die_with_parent()
os.close(int(sys.argv[-1]))
signal.pause()
"""


class Script(Child):
    """Runs a text instead of a module."""

    def __init__(self, script: str, folder: Path) -> None:
        super().__init__("test", "", [], folder / "log", os.environ)
        self._script = script

    def command(self, fd: int) -> list[str]:
        return [sys.executable, "-c", self._script, str(fd)]


def stop(pid: int) -> None:
    """Returns when the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("module", "last_words"), [("this", "Namespaces are one honking great idea"), ("colorsys", "code 0")]
)
def test_the_last_words_of_a_process_are_its_own_and_not_those_of_one_before_it(
    tmp_path: Path, module: str, last_words: str
) -> None:
    log = tmp_path / "log"
    log.write_text("the last words of an earlier process\n")

    async def run() -> None:
        async with Child("short", module, [], log, os.environ) as child:
            await child.ready(60)

    with pytest.raises(ChildDied) as raised:
        asyncio.run(run())
    assert last_words in str(raised.value)
    assert "earlier" not in str(raised.value)


def test_the_end_of_a_process_is_told_when_no_file_can_be_opened_any_more(tmp_path: Path) -> None:
    async def run() -> str:
        async with Script("import signal; signal.pause()", tmp_path) as child:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
            try:
                child.kill()
                return str(await child.died())
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert asyncio.run(run()) == "the test process ended with signal 9: its log cannot be read (Too many open files)"


async def test_a_trainer_that_hangs_is_given_up_and_killed(tmp_path: Path) -> None:
    async with Script("import signal; signal.pause()", tmp_path) as child:
        with pytest.raises(ChildDied, match=r"has not answered SaveCheckpoint for 0\.05 s"):
            await TrainerProcess([child], timeout_s=0.05).save(tmp_path)
        assert (await child.died()).returncode == -signal.SIGKILL


async def test_who_asks_a_killed_trainer_and_who_watches_it_say_the_same_sentence(tmp_path: Path) -> None:
    async with local_ranks(tmp_path / "log", 1) as ranks:
        child, asking = ranks[0], asyncio.create_task(TrainerProcess(ranks).save(tmp_path))
        os.kill(child.pid, signal.SIGKILL)
        watched = str(await child.died())
        with pytest.raises(ChildDied) as raised:
            await asking
    assert str(raised.value) == watched == "the trainer process ended with signal 9"


@LOOPS
def test_a_child_that_closes_its_socket_and_lives_is_killed(tmp_path: Path, loop: Loop) -> None:
    async def run() -> None:
        async with Script(DEAF, tmp_path) as child:
            child.grace_s = 0.3
            with pytest.raises(ChildDied, match="closed its connection without ending, and was killed"):
                await child.call(b"anybody there?", 120)
            assert (await child.died()).returncode == -signal.SIGKILL

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(run(), 60))


@LOOPS
def test_a_concurrent_call_is_answered_when_its_answer_has_come(tmp_path: Path, loop: Loop) -> None:
    async def run() -> None:
        async with Script(LATER, tmp_path) as child:
            waiting = asyncio.create_task(child.call(b"when?", 60, concurrent=True))
            for number in range(3):
                assert await child.call(b"%d" % number, 60) == b"%d" % number
            assert not waiting.done()
            again = asyncio.create_task(child.call(b"again", 60))
            assert await child.call(b"now", 60) == b"now"
            assert (await waiting, await again) == (b"later", b"again")

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(run(), 60))


@LOOPS
def test_a_concurrent_call_hears_of_the_end_of_the_child(tmp_path: Path, loop: Loop) -> None:
    async def run() -> None:
        async with Script(LATER, tmp_path) as child:
            waiting = asyncio.create_task(child.call(b"when?", 60, concurrent=True))
            assert await child.call(b"0", 60) == b"0"
            child.kill()
            with pytest.raises(ChildDied, match="ended with signal 9"):
                await waiting

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(run(), 60))


@LOOPS
def test_the_answer_to_a_cancelled_ask_is_not_the_next_ones(tmp_path: Path, loop: Loop) -> None:
    async def run() -> None:
        async with Script(ECHO, tmp_path) as child:
            assert await child.call(b"zeroth", 60) == b"zeroth"
            stop(child.pid)
            first = asyncio.create_task(child.call(b"first" * 1_000_000, 60))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            os.kill(child.pid, signal.SIGCONT)
            assert await child.call(b"second", 60) == b"second"

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


@LOOPS
def test_a_child_killed_before_it_read_what_it_was_sent_has_died(tmp_path: Path, loop: Loop) -> None:
    async def run() -> None:
        async with Script(ECHO, tmp_path) as child:
            stop(child.pid)
            child.send(b"unread")
            child.kill()
            await child.ready(60)

    with asyncio.Runner(loop_factory=loop) as runner, pytest.raises(ChildDied, match="ended with signal 9"):
        runner.run(asyncio.wait_for(run(), 60))


@LOOPS
def test_a_stopped_child_with_unsent_bytes_is_ended(tmp_path: Path, loop: Loop) -> None:
    async def run() -> None:
        async with Script(ECHO, tmp_path) as child:
            assert await child.call(b"ready", 60) == b"ready"
            stop(child.pid)
            asking = asyncio.create_task(child.call(bytes(4_000_000), 60))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
        assert (await child.died()).returncode == -signal.SIGTERM, "a stopped child takes the signal when it goes on"

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(run(), 60))


class Sleeper(Child):
    """A child that does nothing, and does not end when it is asked to."""

    grace_s = 0.3

    def __init__(self, folder: Path) -> None:
        super().__init__("sleeper", "", [], folder / "log", os.environ)
        self.deaf = folder / "deaf"
        """Is there once the child no longer ends at SIGTERM."""

    def command(self, fd: int) -> list[str]:
        return ["sh", "-c", f"trap '' TERM; : > '{self.deaf}'; while :; do sleep 60; done"]


@LOOPS
@pytest.mark.parametrize("cancels", [1, 2])
def test_no_child_outlives_a_cancelled_start_or_end(tmp_path: Path, loop: Loop, cancels: int) -> None:
    async def life() -> None:
        async with Sleeper(tmp_path):
            pass

    assert left_by(life, loop, cancels) == {}


@LOOPS
@pytest.mark.parametrize("ending", [False, True])
def test_no_child_outlives_the_event_loop_that_waits_in_it_or_for_its_end(
    tmp_path: Path, loop: Loop, ending: bool
) -> None:
    """An event loop that ends cancels all tasks."""

    async def life(entered: asyncio.Event) -> None:
        async with Sleeper(tmp_path) as child:
            await until(child.deaf.exists)
            entered.set()
            await (asyncio.sleep(0) if ending else asyncio.Event().wait())

    async def main() -> asyncio.Task[None]:
        entered = asyncio.Event()
        living = asyncio.create_task(life(entered))
        await entered.wait()
        for _ in range(3):
            await asyncio.sleep(0)
        return living

    before = own_children()
    with asyncio.Runner(loop_factory=loop) as runner:
        living = runner.run(main())
    assert living.cancelled()
    assert [pid for pid in own_children() if pid not in before] == []
