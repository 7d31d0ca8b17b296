"""Tasks of the Python SDK in a swarm: a node accepts answers to tasks that match its own name, digest and settings.

Nodes with the same source and settings share a task; the digest is the SHA-256 of its name and source. A peer chooses
nothing but a seed. A task's code reads peers' text, so it draws, plays and scores in a sandbox (`python_worker`).
"""

import asyncio
import contextlib
import hashlib
import inspect
import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from shoal import wire
from shoal.checker import is_confined, task_spec
from shoal.errors import ChildDied, TaskError, WireError
from shoal.plugins import described
from shoal.sandbox.boxed_child import BoxedChild
from shoal.sandbox.program import Backend
from shoal.sandbox.runner import in_thread, strongest_if_any
from shoal.swarm.trust.limits import USUAL, QuestionLimits
from shoal.swarm.trust.python_worker import DrawSeed, LoadTask, PlayAgain, TaskReply
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.offer import Claim, Course, OfferedRollout
from shoal.tasks.procedural_client import Redrawn, libraries
from shoal.tasks.sdk import Definition
from shoal.types import Message, Receipt, RewardStatus, Role, Split, Task

WORKER = "shoal.swarm.trust.python_worker"
START_TIMEOUT_S = 60.0
MOST_REPLY_BYTES = 4 << 20
MOST_SANDBOXES = 4
"""Sandboxes at once; the least recently used one ends."""
_OWN_FILE = "shoal_own_"
T = TypeVar("T")


class _OtherCourse(TaskError):
    """The environment's messages differ from those of the conversation."""


class _Sandbox(BoxedChild):
    """A running worker."""

    most_frame_bytes = MOST_REPLY_BYTES


@dataclass(frozen=True, slots=True)
class OwnTask:
    """An own task, its digest, and the request that loads it into the sandbox."""

    task: Definition
    digest: str
    """SHA-256 of the author's name and source in hexadecimal digits: equal for nodes that have the same task."""
    load: LoadTask


class PythonTasks:
    """Own tasks of the Python SDK. Use as an async context manager. One event loop.

    Each task has a sandbox, so that no task's state or end reaches another's. It starts with the first request, and
    again after it was killed at a deadline.
    """

    def __init__(self, services: Iterable[object], limits: QuestionLimits = USUAL) -> None:
        self._limits = limits
        self._of_service: dict[str, OwnTask] = {}
        for service in services:
            if isinstance(service, Definition):
                with contextlib.suppress(TaskError):  # such a task is not shared
                    self._of_service[service.name] = own_task(service)
        self._of_claim = {(one.digest, one.load.settings): one for one in self._of_service.values()}
        self._running: OrderedDict[str, _Sandbox] = OrderedDict()  # by task, the least recently used first
        self._turn = asyncio.Lock()
        self._backend: Backend | None = None

    async def __aenter__(self) -> Self:
        """Finds the sandbox of this machine."""
        self._backend = await in_thread(strongest_if_any)
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Ends the sandboxes."""
        for name in list(self._running):
            await self._end(name)

    def __contains__(self, service: str) -> bool:
        """Whether a service is a task of the Python SDK that can be shared."""
        return service in self._of_service

    async def claim(self, task: Task) -> Claim:
        """Builds the claim of an own task. Raises `TaskError`."""
        own = self._of_service[task.service]
        _, split, index = task.id.rsplit("/", 2)
        if split not in [one.value for one in Split] or not index.isdecimal():
            raise TaskError(f"{task.id}: expected NAME/SPLIT/INDEX, as tasks of the SDK are called")
        try:
            seed, question = await asyncio.to_thread(own.task.origin, Split(split), int(index))
        except Exception as error:  # the author's code raises what it will
            raise TaskError(f"{task.id}: {described(error)}") from error
        receipt = Receipt(own.task.name, own.digest, own.load.settings, seed, 0)
        return Claim(own.task.name, question.text, question.answer, receipt, libraries(), own.digest)

    async def task(self, claim: Claim) -> Task | Reason:
        """Finds the training task of a claim by drawing its seed again."""
        own = self._claimed(claim)
        if own is None or claim.receipt is None:
            return Reason.UNKNOWN_TASK
        draw = DrawSeed(own.task.name, claim.receipt.seed, f"{claim.receipt.dataset}/{claim.receipt.seed}")
        drawn = await self._ask(own, draw, Redrawn, Reason.NOT_DRAWN)
        if isinstance(drawn, Reason):
            return drawn
        if (drawn.task.service, drawn.task.id) != (own.task.name, draw.id):  # the sandbox is not trusted
            return Reason.NOT_DRAWN
        try:
            if not (own.task.converses or own.task.scores or is_confined(task_spec(drawn.task))):
                return Reason.UNKNOWN_TASK
        except TaskError:
            return Reason.NOT_DRAWN
        if len(drawn.question) + len(drawn.task.answer or "") > self._limits.characters:
            return Reason.OUT_OF_BOUNDS
        return task_as_claimed(claim, drawn)

    async def course(self, claim: Claim, task: Task, rollout: OfferedRollout) -> Course | Reason:
        """Plays an offered rollout again. Its requests must be the messages of the offer."""
        own = self._claimed(claim)
        assert own is not None, "the task came of it"
        if not (rollout.turns or own.task.converses or own.task.scores):
            return Course()
        said = [turn.message for turn in rollout.turns] or [Message(Role.ASSISTANT, rollout.text)]
        sampled = tuple(turn.message for turn in rollout.turns if turn.sampled) if rollout.turns else tuple(said)
        course = await self._ask(own, PlayAgain(own.task.name, task, sampled), Course, Reason.UNSCORED)
        if isinstance(course, Reason):
            return course
        if course.reward is not None and course.reward.status is not RewardStatus.SCORED:
            return Reason.UNSCORED
        return course if _asked_as_said(task, said, rollout, course) else Reason.OTHER_COURSE

    def _claimed(self, claim: Claim) -> OwnTask | None:
        """The own task of a claim; None if source or settings differ."""
        return None if claim.receipt is None else self._of_claim.get((claim.source, claim.receipt.config))

    async def _ask(self, own: OwnTask, request: DrawSeed | PlayAgain, kind: type[T], failed: Reason) -> T | Reason:
        """A reply of a task's code, or the reason of its failure: `failed` for its errors. A silent sandbox ends."""
        async with self._turn:
            try:
                sandbox = await self._with(own)
                return _value(await sandbox.call(wire.encode(request), self._limits.draw_s), kind)
            except TimeoutError:
                await self._end(own.task.name)
                return Reason.TIMED_OUT
            except _OtherCourse:
                return Reason.OTHER_COURSE
            except TaskError:
                return failed
            except ChildDied:
                await self._end(own.task.name)
                return failed
            except asyncio.CancelledError:
                await self._end(own.task.name)
                raise

    async def _with(self, own: OwnTask) -> _Sandbox:
        """The running sandbox of a task. Raises `ChildDied`, `TaskError` and `TimeoutError`."""
        name = own.task.name
        if name not in self._running:
            while len(self._running) >= MOST_SANDBOXES:
                await self._end(next(iter(self._running)))
            sandbox = _Sandbox("task of the Python SDK", WORKER, [], Path(os.devnull), self._backend)
            self._running[name] = await sandbox.__aenter__()
            await sandbox.ready(START_TIMEOUT_S)
            try:
                _value(await sandbox.call(wire.encode(own.load), START_TIMEOUT_S), bool)
            except TaskError:
                await self._end(name)
                raise
        self._running.move_to_end(name)
        return self._running[name]

    async def _end(self, name: str) -> None:
        sandbox = self._running.pop(name, None)
        if sandbox is not None:
            sandbox.kill()
            await sandbox.end()


def task_as_claimed(claim: Claim, drawn: Redrawn) -> Task | Reason:
    """The task that a claim's receipt gave here; a claim with another question or truth is a lie, or held out."""
    if (drawn.question, drawn.task.answer) == (claim.question, claim.truth):
        return Reason.HELD_OUT if drawn.split is Split.EVAL else drawn.task
    if claim.libraries != libraries():
        return Reason.OTHER_LIBRARIES
    return Reason.WRONG_TRUTH if drawn.question == claim.question else Reason.WRONG_QUESTION


def own_task(task: Definition) -> OwnTask:
    """Finds the source of a task. Raises `TaskError` for a task that is not at the top level of a file."""
    if list(inspect.signature(task.author.draw).parameters)[:2] == ["split", "index"]:
        raise TaskError(f"{task.name}: expected a `draw` from a random generator, so that a seed draws it again")
    module = inspect.getmodule(task.source)
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        raise TaskError(f"{task.name}: expected a task in a separate file, so that peers can be compared with it")
    found = ((name, one) for name, one in vars(module).items() if isinstance(one, Definition))
    entry, original = next(((name, one) for name, one in found if one.source is task.source), ("", task))
    if not entry:
        raise TaskError(f"{task.name}: task not found at the top level of {file}")
    own_name = Path(file).stem if module.__name__.startswith(_OWN_FILE) else module.__name__
    text = Path(file).read_text(encoding="utf-8")
    digest = hashlib.sha256(wire.encode((original.name, text))).hexdigest()
    shared = (task.system_prompt, tuple(task.rewrite), task.eval_share)
    return OwnTask(task, digest, LoadTask(task.name, own_name, entry, text, _settings(task), *shared))


def _asked_as_said(task: Task, said: Sequence[Message], rollout: OfferedRollout, course: Course) -> bool:
    """Tells whether each request was the question and the messages before the answer that followed."""
    if not rollout.turns:
        return [asked.messages for asked in course.asked] == [task.messages]
    if any(turn.sampled != (turn.role is Role.ASSISTANT) for turn in rollout.turns):
        return False
    places = [place for place, turn in enumerate(rollout.turns) if turn.sampled]
    if len(places) != len(course.asked) or places[-1:] != [len(said) - 1]:
        return False
    return all(
        asked.messages == (*task.messages, *said[:place]) for asked, place in zip(course.asked, places, strict=True)
    )


def _settings(task: Definition) -> str:
    """Settings of an author that has fields, as JSON."""
    try:
        fields = msgspec.to_builtins(task.author)
    except TypeError:  # a plain class
        return "{}"
    return json.dumps(fields if isinstance(fields, dict) else {}, sort_keys=True)


def _value(frame: bytes, kind: type[T]) -> T:
    try:
        reply = wire.decode(frame, TaskReply, MOST_REPLY_BYTES)
        if reply.error:
            raise _OtherCourse(reply.error) if reply.other_course else TaskError(reply.error[:500])
        decoder: Any = msgspec.msgpack.decode
        return decoder(reply.value, type=kind)  # type: ignore[no-any-return]
    except (WireError, msgspec.MsgspecError, ValueError) as error:
        raise TaskError(f"task of the Python SDK: {error}") from error
