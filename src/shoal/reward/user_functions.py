"""The user's own reward functions, in a process that can be killed; `user_functions_worker` is the other side.

The functions are the user's code, so they get a user's environment, files and network. They are called as TRL's:
`reward(prompts, completions, **columns)`, with one entry per answer in each. They return one number or None per answer;
None is no reward.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from shoal import checker, wire
from shoal.checker import Spec
from shoal.errors import ChildDied, TaskError, WireError
from shoal.net.process import Child
from shoal.net.renewed import RenewedChild
from shoal.reward.messages import Batch
from shoal.types import Reward, RewardStatus, Task

Values = list[float | None]


class FunctionScorer:
    """One process for each function, started when it is first called."""

    def __init__(self, log: Path = Path(os.devnull)) -> None:
        self._log = log
        self._children: dict[str, RenewedChild] = {}

    async def aclose(self) -> None:
        """Ends the processes."""
        for child in self._children.values():
            await child.close()

    async def score_by(self, spec: Spec, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order. The deadline is for all answers together, without the wait in the queue."""
        assert isinstance(spec, checker.Function)
        none = Reward(0.0, RewardStatus.FAILED, evidence=f"{spec.path} gave None")
        try:
            return [none if value is None else Reward(value) for value in await self.values(spec, task, answers)]
        except TimeoutError as error:
            return [Reward(0.0, RewardStatus.TIMED_OUT, evidence=str(error))] * len(answers)
        except TaskError as error:
            return [Reward(0.0, RewardStatus.FAILED, evidence=str(error))] * len(answers)

    async def values(self, spec: checker.Function, task: Task, answers: Sequence[str]) -> Values:
        """Numbers that the function returns. Raises `TaskError` if it fails or returns none, and `TimeoutError`."""
        call = wire.encode(Batch(spec, task, list(answers)))
        child = self._children.setdefault(spec.path, RenewedChild(self._made))
        try:
            given = wire.decode(await child.call(call, spec.timeout_s), Values | str)  # type: ignore[arg-type]
        except TimeoutError:
            raise TimeoutError(f"{spec.path} gave no rewards within {spec.timeout_s:g} s") from None
        except (ChildDied, WireError) as error:
            raise TaskError(str(error)) from None
        if isinstance(given, str):
            raise TaskError(given)
        return given

    def _made(self) -> Child:
        return Child("reward function", "shoal.reward.user_functions_worker", [], self._log, os.environ)
