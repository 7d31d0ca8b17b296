"""A standstill is an event: it names the waits and the action taken, and ends the run when nothing helps."""

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shoal.clock import waits
from shoal.engine.http_client import HttpEngine
from shoal.errors import EngineError, StoodStill
from shoal.net.process import Child
from shoal.run.loop import LoopDeps, TrainLoop

CHECKS = 8
"""Checks of progress within the time that a run may stand still."""
FRUITLESS = 3
"""Standstills in a row without a possible action, after which a run ends."""
STANDSTILLS = 10
"""Standstills in a row after which a run ends, whatever was done."""
ANSWER_TIMEOUT_S = 10.0
"""Seconds that an engine may take to report its state."""
LONGEST_WAITS = 2000


@dataclass(slots=True)
class OwnEngines:
    """Engine processes of this run, which it may resume or restart."""

    running: dict[str, tuple[Child, HttpEngine]] = field(default_factory=dict)
    starting: set[str] = field(default_factory=set)
    """Engines that are starting, which have a deadline of their own."""

    async def helped(self) -> list[str]:
        """Resumes paused engines and kills silent ones, which then start again; returns a sentence for each."""
        actions = [f"{name} is starting" for name in sorted(self.starting)]
        for name, (child, engine) in list(self.running.items()):
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await engine.alive()
                    if await engine.paused():
                        await engine.resume()
                        actions.append(f"{name} was paused and is resumed")
            except (EngineError, TimeoutError):
                child.kill()
                actions.append(f"{name} does not answer and is started again")
        return actions


async def watch_progress(
    progress: Callable[[], Hashable],
    help_up: Callable[[], Awaitable[list[str]]],
    report: Callable[[str], None],
    stall_s: float,
) -> None:
    """Watches `progress` for ever; after `stall_s` without any, acts and reports the action.

    Raises `StoodStill` after too many standstills in a row.
    """
    loop = asyncio.get_running_loop()
    seen, since_s, acted_s, fruitless, standstills = progress(), loop.time(), loop.time(), 0, 0
    while True:
        await asyncio.sleep(stall_s / CHECKS)
        now = progress()
        if now != seen:
            seen, since_s, acted_s, fruitless, standstills = now, loop.time(), loop.time(), 0, 0
            continue
        if loop.time() - acted_s < stall_s:
            continue
        still_s = loop.time() - since_s
        waiting = "; ".join(waits(loop))[:LONGEST_WAITS]
        helped = await help_up()
        what = ", ".join(helped) if helped else "nothing was found that would help"
        report(f"nothing has moved for {still_s:.0f} s; {what}; {waiting}")
        acted_s = loop.time()
        standstills += 1
        fruitless = 0 if helped else fruitless + 1
        if fruitless == FRUITLESS or standstills == STANDSTILLS:
            raise StoodStill(f"nothing has moved for {still_s:.0f} s; {what}; go on with --resume")


async def watch_run(parts: LoopDeps, loop: TrainLoop, trainer: Child, own: OwnEngines) -> None:
    """Watches a run: any token, group, step, evaluation, Version or work of the trainer is progress."""

    def progress() -> Hashable:
        finished = sum(counts.finished for counts in parts.buffer.counts.values())
        return (*loop.progress, finished, cpu_ticks(trainer.pid))

    def report(reason: str) -> None:
        parts.trackers.log_event("standstill", reason=reason)

    await watch_progress(progress, own.helped, report, parts.config.stall_s)


def cpu_ticks(pid: int) -> int:
    """Processor time of a process in ticks; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


@contextmanager
def report_waits() -> Iterator[None]:
    """Answers SIGUSR1 within the block. Signals reach the main thread only, so elsewhere it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: sys.stderr.write("\n".join(waits(loop)) + "\n"))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
