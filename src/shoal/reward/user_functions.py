"""The user's own reward functions, in a process that can be killed; `user_functions_worker` is the other side.

The functions are the user's code, so they get a user's environment, files and network. They are called as TRL's:
`reward(prompts, completions, **columns)`, with one entry per answer in each. They return one number or None per answer;
None is no reward.
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
"""Number of further attempts after the process died."""


class FunctionRequest(msgspec.Struct, frozen=True):
    """The arguments of a function's call, once for a group."""

    path: str
    messages: list[dict[str, str]]
    answers: list[str]
    truth: str | None
    info: str


class FunctionResult(msgspec.Struct, frozen=True):
    """The rewards of a call, or the error."""

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
        """One reward per answer, in order. The deadline is for all answers together, without the wait in the queue."""
        assert isinstance(spec, checker.Function)
        status, result = await self.call(spec, task, answers)
        if status is not RewardStatus.SCORED:
            return [Reward(0.0, status, evidence=result.error)] * len(answers)
        return [
            Reward(0.0, RewardStatus.FAILED, evidence=f"{spec.path} gave None") if value is None else Reward(value)
            for value in result.values
        ]

    async def call(
        self, spec: checker.Function, task: Task, answers: Sequence[str]
    ) -> tuple[RewardStatus, FunctionResult]:
        """Calls the function and returns its result, with the status."""
        messages = [{"role": message.role.value, "content": message.content} for message in task.messages]
        call = wire.encode(FunctionRequest(spec.path, messages, list(answers), task.answer, task.info))
        async with self._turns.setdefault(spec.path, asyncio.Lock()):
            for attempt in range(RETRIES + 1):
                try:
                    result = await self._ask(spec, call)
                    return (RewardStatus.FAILED if result.error else RewardStatus.SCORED), result
                except TimeoutError:
                    why = f"{spec.path} gave no rewards within {spec.timeout_s:g} s"
                    return RewardStatus.TIMED_OUT, FunctionResult(error=why)
                except (ChildDied, WireError) as error:
                    await self._end(spec.path)
                    if attempt == RETRIES:
                        return RewardStatus.FAILED, FunctionResult(error=str(error))
        raise AssertionError

    async def _ask(self, spec: checker.Function, call: bytes) -> FunctionResult:
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
