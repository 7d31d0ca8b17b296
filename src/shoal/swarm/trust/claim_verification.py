"""Matches a peer's claim with a task of this node; implements `trust.Recogniser`.

The receipt of a procedural task is drawn again in a killable process with bounded memory and no files to write.
Question and truth come from that draw. A claim that differs is a signed lie, unless other libraries drew it.

By default a node draws only its own datasets with its own settings, so a peer can choose nothing but a seed.
`swarm.datasets` allows others.

A task of the Python SDK is drawn and played in a sandbox (`python_tasks`).

A task without a receipt is looked up by its question among the node's own. Tasks with a user's function or a judge as
scorer are never matched, so peers' text does not reach those scorers.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from shoal.checker import is_confined, task_spec
from shoal.config import SwarmConfig
from shoal.errors import OtherRelease, OutOfBounds, TaskError
from shoal.interfaces import Environment
from shoal.swarm.trust.limits import USUAL, QuestionLimits
from shoal.swarm.trust.python_tasks import PythonTasks, task_as_claimed
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.offer import Claim, Course, OfferedRollout
from shoal.tasks.jsonl import JsonlService
from shoal.tasks.procedural_client import NoReply, ProceduralClient, ReasoningGymService, Spec, libraries
from shoal.types import Message, Receipt, Role, Split, Task


class OwnTasks:
    """Matches peers' claims with the tasks of `services`. Use as a context manager: it may hold a child process."""

    def __init__(
        self,
        services: Iterable[Environment],
        bounds: SwarmConfig | None = None,
        python: PythonTasks | None = None,
        limits: QuestionLimits = USUAL,
    ) -> None:
        """`bounds` has the datasets that are drawn with a peer's settings, `limits` the cost of such draws.

        Without `python`, tasks of the Python SDK are neither shared nor taken.
        """
        services, self._python = list(services), python
        self._bounds, self._limits = bounds or SwarmConfig(), limits
        self._specs = {one.spec.dataset: one.spec for one in services if isinstance(one, ReasoningGymService)}
        self._listed: dict[str, tuple[Split, Task]] = {}
        for service in services:
            if isinstance(service, JsonlService):
                for split in Split:
                    self._listed.update({_question(task): (split, task) for task in service.tasks(split)})
        # Separate from training's drawer, so peers' claims cannot delay training.
        draws = bool(self._specs) or self._bounds.datasets != "mine"
        self._drawer = ProceduralClient(limits.draw_s, boxed=True) if draws else None

    def check(self) -> None:
        """Draws once from each dataset allowed by name. Blocks. Raises `TaskError` for an unknown dataset."""
        if self._drawer is not None and not isinstance(self._bounds.datasets, str):
            for name in self._bounds.datasets:
                self._drawer.config_json(name, "{}", None)

    def close(self) -> None:
        """Ends the process that draws."""
        if self._drawer is not None:
            self._drawer.close()

    async def claim(self, task: Task) -> Claim:
        """Builds the claim of an own task. Raises `TaskError` for a task that cannot be shared."""
        if self._python is not None and task.service in self._python:
            return await self._python.claim(task)
        if task.receipt is None:
            if _question(task) not in self._listed:
                raise TaskError(f"{task.service}: its tasks have no receipts, and are in no file")
            return Claim(task.service, _question(task), task.answer)
        spec = self._specs.get(task.receipt.dataset)
        if spec is None or self._drawer is None:
            raise TaskError(f"{task.service}: no dataset of this node")
        question = task.messages[-1].content
        if spec.rewrite:
            question, _, _ = await asyncio.to_thread(self._drawer.redraw, spec, task.receipt)
        return Claim(task.service, question, task.answer, task.receipt, libraries())

    async def task(self, claim: Claim) -> Task | Reason:
        """Finds the training task with the claim's question; prompt, truth and scorer are this node's own."""
        if claim.source:
            return Reason.UNKNOWN_TASK if self._python is None else await self._python.task(claim)
        found = await self._found(claim)
        return found if isinstance(found, Reason) or is_confined(task_spec(found)) else Reason.UNKNOWN_TASK

    async def course(self, claim: Claim, task: Task, rollout: OfferedRollout) -> Course | Reason:
        """Plays a rollout of a Python task again; any other task has one question and one answer."""
        if claim.source and self._python is not None:
            return await self._python.course(claim, task, rollout)
        return Reason.OTHER_COURSE if rollout.turns else Course()

    async def _found(self, claim: Claim) -> Task | Reason:
        if claim.receipt is None:
            split, task = self._listed.get(claim.question, (Split.TRAIN, None))
            if task is None or task.answer != claim.truth:  # two honest nodes may have different files
                return Reason.UNKNOWN_TASK
            return Reason.HELD_OUT if split is Split.EVAL else task
        spec = self._spec(claim.receipt)
        if spec is None or self._drawer is None or claim.receipt.index:
            return Reason.UNKNOWN_TASK
        return await asyncio.to_thread(self._redrawn, self._drawer, spec, claim)

    def _spec(self, receipt: Receipt) -> Spec | None:
        own = self._specs.get(receipt.dataset)
        if own is not None and own.config == receipt.config:
            return own
        allowed = self._bounds.datasets
        if allowed == "mine" or (allowed != "any" and receipt.dataset not in allowed):
            return None
        if own is not None:
            return replace(own, config=receipt.config)
        own = next(iter(self._specs.values()), None)  # the system prompt is that of the node's first task
        if own is None:
            return Spec(receipt.dataset, receipt.config)
        return Spec(receipt.dataset, receipt.config, own.system_prompt, eval_share=own.eval_share)

    def _redrawn(self, drawer: ProceduralClient, spec: Spec, claim: Claim) -> Task | Reason:
        assert claim.receipt is not None
        most = None if spec in self._specs.values() else self._limits.characters
        try:
            return task_as_claimed(claim, drawer.redraw(spec, claim.receipt, most))
        except TaskError as error:
            return _UNDRAWN.get(type(error), Reason.NOT_DRAWN)


_UNDRAWN = {
    NoReply: Reason.TIMED_OUT,
    OtherRelease: Reason.UNKNOWN_TASK,
    OutOfBounds: Reason.OUT_OF_BOUNDS,
}


def _question(task: Task) -> str:
    """Joins the prompt's messages without the node's own system prompt."""
    asked: list[Message] = [message for message in task.messages if message.role is not Role.SYSTEM]
    return "\n\n".join(message.content for message in asked)
