"""The user's own reward functions, in a process that can be killed: the other side is `functions_worker`.

They are the user's code, so that they get what a user's program gets: environment, files, network. What they are
called with is TRL's: `reward(prompts, completions, **columns)`, one entry per answer in each, and they give one number
each, or None for an answer that they have nothing to say about.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal import checker, wire
from shoal.checker import Spec
from shoal.errors import ChildDied, WireError
from shoal.net.process import Child
from shoal.types import Reward, RewardStatus, Task

START_TIMEOUT_S = 120.0
RETRIES = 1
"""After a death of the process."""


class FunctionCall(msgspec.Struct, frozen=True):
    """What a function is called with, once for a group."""

    path: str
    messages: list[dict[str, str]]
    answers: list[str]
    truth: str | None
    info: str


class FunctionResult(msgspec.Struct, frozen=True):
    """What it gave, or why it did not."""

    values: list[float | None] = []
    error: str = ""


class FunctionScorer:
    """One process for each function, started when it is first called."""

    def __init__(self, log: Path = Path(os.devnull)) -> None:
        self._log = log
        self._children: dict[str, Child] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def aclose(self) -> None:
        """Ends the processes."""
        for path in list(self._children):
            await self._end(path)

    async def score_by(self, spec: Spec, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order. The deadline is for all of them together; queueing does not count."""
        assert isinstance(spec, checker.Function)
        status, called = await self.called(spec, task, answers)
        if status is not RewardStatus.SCORED:
            return [Reward(0.0, status, evidence=called.error)] * len(answers)
        return [
            Reward(0.0, RewardStatus.FAILED, evidence=f"{spec.path} gave None") if value is None else Reward(value)
            for value in called.values
        ]

    async def called(
        self, spec: checker.Function, task: Task, answers: Sequence[str]
    ) -> tuple[RewardStatus, FunctionResult]:
        """What the function gave, and whether it gave anything."""
        messages = [{"role": message.role.value, "content": message.content} for message in task.messages]
        call = wire.encode(FunctionCall(spec.path, messages, list(answers), task.answer, task.info))
        async with self._turns.setdefault(spec.path, asyncio.Lock()):
            for attempt in range(RETRIES + 1):
                try:
                    called = await self._called(spec, call)
                    return (RewardStatus.FAILED if called.error else RewardStatus.SCORED), called
                except TimeoutError:
                    why = f"{spec.path} gave no rewards within {spec.timeout_s:g} s"
                    return RewardStatus.TIMED_OUT, FunctionResult(error=why)
                except (ChildDied, WireError) as error:
                    await self._end(spec.path)
                    if attempt == RETRIES:
                        return RewardStatus.FAILED, FunctionResult(error=str(error))
        raise AssertionError

    async def _called(self, spec: checker.Function, call: bytes) -> FunctionResult:
        child = self._children.get(spec.path)
        if child is None:
            child = Child("reward function", "shoal.reward.user_functions_worker", [], self._log, os.environ)
            self._children[spec.path] = await child.__aenter__()
            await child.receive(START_TIMEOUT_S)
        try:
            return wire.decode(await child.ask(call, spec.timeout_s), FunctionResult)
        except BaseException as error:  # it is in the middle of something
            child.kill()
            if not isinstance(error, ChildDied):
                await self._end(spec.path)
            raise

    async def _end(self, path: str) -> None:
        child = self._children.pop(path, None)
        if child is not None:
            await child.end()
