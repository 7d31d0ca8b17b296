"""Which of this node's own tasks a peer means; implements `interfaces.Recogniser`.

Of a procedural task the receipt is drawn again, in a process of its own that may be killed, with bounded memory and no
files to write: question and truth then come from here, and a claim that differs is a lie, signed by its author, unless
it was drawn with other libraries. By itself a node draws only the datasets that it trains on, with the settings that it
trains on, so that what a peer can choose is a seed. `DrawBounds` say which others it draws.
Of a task without a receipt only the question is looked up among the node's own. Tasks that a function of the user's or
a judge scores are nobody else's: what peers write does not get there.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from shoal.checker import is_confined, task_spec
from shoal.errors import OtherRelease, OutOfBounds, TaskError
from shoal.interfaces import Claim, NotOurs, TaskService
from shoal.tasks.jsonl import JsonlService
from shoal.tasks.library import ReasoningGymService
from shoal.tasks.procedural_client import NoReply, ProceduralClient, Spec, libraries
from shoal.types import Message, Receipt, Role, Split, Task

REDRAW_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class DrawBounds:
    """Which questions a node draws for others."""

    datasets: Literal["mine", "any"] | tuple[str, ...] = "mine"
    """Beside its own settings of its own datasets: nothing, everything, or any settings of these datasets."""
    draw_s: float = REDRAW_TIMEOUT_S
    characters: int = 8000
    """Of question and truth together, where the settings are not its own."""

    def allows(self, dataset: str) -> bool:
        """Whether a dataset is drawn with others' settings."""
        return self.datasets == "any" or (self.datasets != "mine" and dataset in self.datasets)


class OwnTasks:
    """Knows the tasks of some services. Use as a context manager: it may own a process that draws."""

    def __init__(self, services: Iterable[TaskService], bounds: DrawBounds | None = None) -> None:
        services = list(services)
        self._bounds = bounds or DrawBounds()
        self._specs = {one.spec.dataset: one.spec for one in services if isinstance(one, ReasoningGymService)}
        self._listed: dict[str, tuple[Split, Task]] = {}
        for service in services:
            if isinstance(service, JsonlService):
                for split in Split:
                    self._listed.update({_question(task): (split, task) for task in service.tasks(split)})
        # A drawer beside that of training: what a peer sends holds up nobody but peers.
        draws = bool(self._specs) or self._bounds.datasets != "mine"
        self._drawer = ProceduralClient(self._bounds.draw_s, boxed=True) if draws else None

    def check(self) -> None:
        """Blocks. Raises `TaskError` for a dataset to be drawn for others that does not exist."""
        if self._drawer is not None and not isinstance(self._bounds.datasets, str):
            for name in self._bounds.datasets:
                self._drawer.config_json(name, "{}", None)

    def close(self) -> None:
        """Ends the process that draws."""
        if self._drawer is not None:
            self._drawer.close()

    async def claim(self, task: Task) -> Claim:
        """What to tell others of a task of this node. Raises `TaskError` for one that cannot be told."""
        if task.receipt is None:
            if _question(task) not in self._listed:
                raise TaskError(f"{task.service}: its tasks have no receipts, and are in no file")
            return Claim(task.service, _question(task), task.answer)
        spec = self._specs.get(task.receipt.dataset)
        if spec is None or self._drawer is None:
            raise TaskError(f"{task.service}: no dataset of this node")
        if not spec.rewrite:
            return Claim(task.service, task.messages[-1].content, task.answer, task.receipt, libraries())
        question, _, _ = await asyncio.to_thread(self._drawer.redraw, spec, task.receipt)
        return Claim(task.service, question, task.answer, task.receipt, libraries())

    async def task(self, claim: Claim) -> Task | NotOurs:
        """The training task of this node that asks the same, with this node's own prompt, truth and scorer."""
        found = await self._found(claim)
        return found if isinstance(found, NotOurs) or is_confined(task_spec(found)) else NotOurs.UNKNOWN_TASK

    async def _found(self, claim: Claim) -> Task | NotOurs:
        if claim.receipt is None:
            split, task = self._listed.get(claim.question, (Split.TRAIN, None))
            if task is None or task.answer != claim.truth:  # two files may differ without anybody lying
                return NotOurs.UNKNOWN_TASK
            return NotOurs.HELD_OUT if split is Split.EVAL else task
        spec = self._spec(claim.receipt)
        if spec is None or self._drawer is None or claim.receipt.index:
            return NotOurs.UNKNOWN_TASK
        return await asyncio.to_thread(self._redrawn, self._drawer, spec, claim)

    def _spec(self, receipt: Receipt) -> Spec | None:
        """How this node draws a receipt: as its own task, or as one that it has only of others."""
        own = self._specs.get(receipt.dataset)
        if own is not None and own.config == receipt.config:
            return own
        if not self._bounds.allows(receipt.dataset):
            return None
        if own is not None:
            return replace(own, config=receipt.config)
        told = next(iter(self._specs.values()), None)  # how to answer is said to the model as in the node's first task
        return Spec(receipt.dataset, receipt.config, told.system_prompt if told else "")

    def _redrawn(self, drawer: ProceduralClient, spec: Spec, claim: Claim) -> Task | NotOurs:
        """Blocks while it is drawn."""
        assert claim.receipt is not None
        most = None if spec in self._specs.values() else self._bounds.characters
        try:
            question, task, split = drawer.redraw(spec, claim.receipt, most)
        except NoReply:
            return NotOurs.TIMED_OUT
        except OtherRelease:
            return NotOurs.UNKNOWN_TASK
        except OutOfBounds:
            return NotOurs.OUT_OF_BOUNDS
        except TaskError:
            return NotOurs.NOT_DRAWN
        differs = question != claim.question or task.answer != claim.truth
        if differs and claim.libraries != libraries():
            return NotOurs.OTHER_LIBRARIES
        if question != claim.question:
            return NotOurs.WRONG_QUESTION
        if task.answer != claim.truth:
            return NotOurs.WRONG_TRUTH
        return NotOurs.HELD_OUT if split is Split.EVAL else task


def _question(task: Task) -> str:
    """What is asked, as one text; the node's own system prompt is left out."""
    asked: list[Message] = [message for message in task.messages if message.role is not Role.SYSTEM]
    return "\n\n".join(message.content for message in asked)
