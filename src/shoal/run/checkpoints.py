"""Checkpoints of a run: when one is due, its files, its seal after the log, and the archive of older steps."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.config import Config
from shoal.experience import checkpoint
from shoal.experience.buffer import Buffer
from shoal.trainer.worker import StepTrainer

EARLY_S = 120.0
"""Seconds without a checkpoint after which a step's end writes one, however many steps are to come."""
TIMES_SAVING = 20.0
"""Multiple of the seconds of one checkpoint that passes until time alone makes the next one due."""


@dataclass(slots=True)
class CheckpointDue:
    """Rule of checkpoints: after every so many steps, and sooner where steps are slow and saving is not."""

    every_steps: int
    clock: Callable[[], float] = time.monotonic
    _saved_s: float = field(init=False)
    _took_s: float = 0.0

    def __post_init__(self) -> None:
        self._saved_s = self.clock()

    def after(self, step: int) -> bool:
        """Whether a checkpoint is due at the end of a step, counted from 0."""
        waited_s = self.clock() - self._saved_s
        return (step + 1) % self.every_steps == 0 or waited_s >= max(EARLY_S, TIMES_SAVING * self._took_s)

    def saved(self, seconds: float) -> None:
        """Notes that a checkpoint's files were handed over just now, in so many seconds."""
        self._saved_s, self._took_s = self.clock(), seconds

    def sealed(self, seconds: float) -> None:
        """Adds the seconds that training then waited until the checkpoint was whole."""
        self._took_s += seconds


@dataclass(slots=True)
class Checkpoints:
    """Checkpoints of a run. Invariant: a checkpoint is sealed after the log, on disk, has all of its steps."""

    config: Config
    run_dir: Path
    trainer: StepTrainer
    buffer: Buffer
    clock: Callable[[], float] = time.monotonic
    saved: int | None = None
    """The step of saved files that are not sealed yet."""
    newest: int = -1
    """The newest step of this process whose files were handed over."""
    due: CheckpointDue = field(init=False)
    _archiving: asyncio.Task[None] | None = None
    _archived: int = -1

    def __post_init__(self) -> None:
        self.due = CheckpointDue(self.config.checkpoint.every_steps, self.clock)

    async def save(self, step: int) -> float:
        """Has the trainer save its state after `step`; returns the trainer's seconds."""
        began_s = self.clock()
        directory = await asyncio.to_thread(checkpoint.begin, self.run_dir, step)
        busy_s = await self.trainer.save(directory, later=self.config.checkpoint.asynchronous)
        self.saved = self.newest = step
        self.due.saved(self.clock() - began_s)
        return busy_s

    async def seal(self, tasks: asyncio.TaskGroup) -> None:
        """Seals the saved files, if there are some, and archives old steps in `tasks`."""
        if self.saved is None:
            return
        step, self.saved, began_s = self.saved, None, self.clock()
        if self.config.checkpoint.asynchronous:
            await self.trainer.finish_save(checkpoint.unfinished(self.run_dir, step))
        await self.buffer.sync()
        await asyncio.to_thread(checkpoint.seal, self.run_dir, step, keep=self.config.checkpoint.keep)
        await self._archive(step, tasks)
        self.due.sealed(self.clock() - began_s)

    async def archived(self) -> None:
        """Waits for the archiving that is under way."""
        if self._archiving is not None:
            await self._archiving

    async def _archive(self, step: int, tasks: asyncio.TaskGroup) -> None:
        """Moves steps that are too old for replay out of the log, `log.keep_steps` or more at a time."""
        keep = self.config.log.keep_steps
        saved = await asyncio.to_thread(checkpoint.checkpoints, self.run_dir)
        through = min(step - keep, saved[0].step)
        if keep and through - self._archived >= keep and (self._archiving is None or self._archiving.done()):
            self._archived = through
            self._archiving = tasks.create_task(self.buffer.archive(through), name="archiving the log")
