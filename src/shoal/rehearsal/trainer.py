"""Trainer, scorer, renderer and tasks of a rehearsal: each takes virtual time and decides nothing."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from shoal.interfaces import Environment, Worker
from shoal.rehearsal.costs import TrainerCost
from shoal.rehearsal.engine import FIRST_LENGTH, LOGPROB, STOP
from shoal.trainer.messages import Logprobs, StepStats, TokensFile
from shoal.trainer.packing import prompt_length
from shoal.types import Message, Reward, Role, Sample, Split, Task, seed_for

ANSWER = Message(Role.ASSISTANT, "")
PROMPT_IDS = 2
"""Ids of a prompt: its task's number, and one that stands for all tokens."""


def row_tokens(row: Sample, prompt: int) -> int:
    """Tokens of the model for which a rehearsed row stands."""
    return prompt + row.tokens[prompt_length(row)] - FIRST_LENGTH


@dataclass(slots=True)
class RehearsedTrainer:
    """Implements `StepTrainer` without ranks."""

    cost: TrainerCost
    prompt_tokens: int
    ranks: Sequence[Worker] = ()

    async def step(
        self,
        groups: Sequence[tuple[Sample, ...]],
        version: int | None = None,
        since_push: int = 0,
        *,
        tokens_file: TokensFile | None = None,
    ) -> StepStats:
        """Takes the seconds of a step; rows without any advantage take none."""
        rows = [row for group in groups for row in group]
        sizes = [row_tokens(row, self.prompt_tokens) for row in rows]
        computed = [size for row, size in zip(rows, sizes, strict=True) if any(row.advantages)]
        seconds = self.cost.step_s(computed)
        await asyncio.sleep(seconds)
        tokens, done = sum(sizes), sum(computed)
        return StepStats(tokens=tokens, skipped_tokens=tokens - done, computed_tokens=done, updates=1, seconds=seconds)

    async def logprobs(self, rows: Sequence[Sequence[int]], *, temperature: float = 1.0) -> Logprobs:
        """Takes a forward pass, a third of the seconds of forward and backward."""
        await asyncio.sleep(self.cost.token_s * sum(map(len, rows)) / 3)
        return tuple((LOGPROB,) * (len(row) - 1) for row in rows)

    async def write_version(self, path: Path | None, *, push: bool = True, later: bool = False) -> float:
        """Takes the seconds of a Version, and writes a file that stands for it."""
        await asyncio.sleep(self.cost.write_s)
        if path is not None:
            await asyncio.to_thread(path.write_bytes, b"")
        return self.cost.write_s

    async def save(self, directory: Path, *, later: bool = False) -> float:
        """Takes the seconds of a checkpoint, none of them here when files are written later."""
        (directory / "rehearsed").write_bytes(b"")
        seconds = 0.0 if later else self.cost.save_s
        await asyncio.sleep(seconds)
        return seconds

    async def finish_save(self, directory: Path) -> None:
        """Takes the seconds of a checkpoint's files; a Version's have passed with its write."""
        if await asyncio.to_thread((directory / "rehearsed").exists):
            await asyncio.sleep(self.cost.save_s)

    async def load(self, directory: Path) -> float:
        """Takes the seconds of a checkpoint."""
        await asyncio.sleep(self.cost.save_s)
        return self.cost.save_s


@dataclass(slots=True)
class RehearsedScorer:
    """Implements `Scorer`: a number of workers, each with a time per answer; rewards are 0 or 1 by chance."""

    seconds: Callable[[random.Random], float]
    workers: int
    solved: float = 0.5
    """Mean share of right answers; a task's own share is uniform around it."""
    _free: asyncio.Semaphore | None = field(default=None)

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""
        rng = random.Random(seed_for("score", task.id))
        half = min(self.solved, 1 - self.solved)
        share = rng.uniform(self.solved - half, self.solved + half)
        self._free = self._free or asyncio.Semaphore(self.workers)
        taken = [self.seconds(rng) for _ in answers]
        if any(taken):
            await asyncio.gather(*map(self._one, taken))
        return [Reward(float(rng.random() < share)) for _ in answers]

    async def _one(self, seconds: float) -> None:
        assert self._free is not None
        async with self._free:
            await asyncio.sleep(seconds)


class RehearsedRenderer:
    """Implements `Renderer`: a prompt is its task's number, and an answer has no text."""

    stop_token_ids = (STOP,)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids that stand for a prompt."""
        return [FIRST_LENGTH + int(messages[0].content)] + [0] * (PROMPT_IDS - 1)

    def message(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> Message:
        """An empty answer."""
        return ANSWER

    def completion_ids(self, text: str, prompt_ids: Sequence[int]) -> list[int] | None:
        """None: texts of peers are not rehearsed."""
        return None


class RehearsedTasks(Environment):
    """Environment of one configured task."""

    def __init__(self, name: str) -> None:
        self.name = name

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`."""
        return _task(self.name, split, index)

    async def drawn(self, split: Split, index: int) -> Task:
        """The task at `index`, at once."""
        return _task(self.name, split, index)


@lru_cache(maxsize=1024)
def _task(name: str, split: Split, index: int) -> Task:
    number = 2 * (index % (1 << 60)) + (split is Split.EVAL)
    return Task(f"{name}/{split}/{index}", name, (Message(Role.USER, str(number)),))
