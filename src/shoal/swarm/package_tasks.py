"""Tasks of the Python SDK in a swarm: each is a package, drawn, played and scored again in a sandbox of its own.

A node accepts a package by name and digest: those of its own tasks, and the ones in `swarm.packages`. A package that it
lacks is fetched from the exchange by its digest. A peer chooses nothing but a seed and, within the task's own fields,
the settings. Package code reads peers' text, so it runs in `package_worker` only, also where it is the node's own.
"""

import asyncio
import contextlib
import json
import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import msgspec

from shoal import wire
from shoal.checker import is_confined, task_spec
from shoal.config import SwarmConfig
from shoal.errors import ChildDied, ExchangeUnavailable, SandboxUnavailable, TaskError, WireError
from shoal.files import replaced
from shoal.interfaces import Attachments
from shoal.net.identity import Identity
from shoal.plugins import described
from shoal.sandbox.boxed_child import BoxedChild
from shoal.sandbox.program import Backend
from shoal.sandbox.runner import strongest
from shoal.swarm.offer import Claim, Course, OfferedRollout
from shoal.swarm.package_worker import (
    DrawSeed,
    Loaded,
    LoadPackage,
    PackageReply,
    PlayAgain,
    QuestionReply,
    ReadAttachments,
    ScoreAnswer,
)
from shoal.swarm.task_package import MAX_PACKAGE_BYTES, TaskPackage, package_of, reference_of, sealed, unsealed
from shoal.swarm.trust import Reason
from shoal.tasks.holdout import split_of
from shoal.tasks.procedural_client import libraries
from shoal.tasks.sdk import Definition, Question
from shoal.types import Message, Receipt, Reward, RewardStatus, Role, Split, Task

WORKER = "shoal.swarm.package_worker"
START_TIMEOUT_S = 60.0
MOST_REPLY_BYTES = 4 << 20
MOST_WORKERS = 4
"""Sandboxes at once; the least recently used one ends."""
ATTACH_EVERY_S = 600.0
MOST_SETTINGS = 4096
"""Characters of an offer's settings."""
T = TypeVar("T")
Request: TypeAlias = DrawSeed | PlayAgain | ScoreAnswer | ReadAttachments


class _OtherCourse(TaskError):
    """The environment goes on otherwise than the conversation."""


class _Sandbox(BoxedChild):
    """A running package worker."""

    most_frame_bytes = MOST_REPLY_BYTES


@dataclass(slots=True)
class _Running:
    """One package with settings, loaded in a sandbox."""

    child: _Sandbox
    loaded: Loaded


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A package that this node accepts; `own` is its own task of it, if it has one."""

    package: TaskPackage
    own: Definition | None = None

    def named(self) -> Definition:
        """The task with this node's name, prompt and rewriting; a foreign one has its package's name and nothing."""
        return self.own or Definition(self.package.name, _Nothing())


class _Nothing:
    """The author of a foreign task, whose code is in the sandbox only."""

    def draw(self, _: object) -> Question:
        raise AssertionError("a foreign package is drawn in its sandbox")


class PackageTasks:
    """Packages that a node accepts. Use as an async context manager. One event loop."""

    def __init__(
        self,
        services: Iterable[object],
        bounds: SwarmConfig,
        folder: Path | None = None,
        attachments: Attachments | None = None,
        identity: Identity | None = None,
    ) -> None:
        """`folder` keeps fetched packages; `attachments` has those of peers, and gets those that `identity` signs.

        Raises `ConfigError`.
        """
        self._bounds, self._folder, self._attachments, self._identity = bounds, folder, attachments, identity
        self._attached_s: dict[str, float] = {}
        self._accepted: dict[str, _Accepted] = {}
        self._of_service: dict[str, TaskPackage] = {}
        for service in services:
            if isinstance(service, Definition):
                with contextlib.suppress(TaskError):  # such a task is not shared
                    package = package_of(service)
                    self._accepted[package.digest] = _Accepted(package, service)
                    self._of_service[service.name] = package
        self._wanted = {digest: name for name, digest in map(reference_of, bounds.packages)}
        self._running: OrderedDict[tuple[str, str], _Running] = OrderedDict()
        self._turn = asyncio.Lock()
        self._backend: Backend | None = None

    async def __aenter__(self) -> Self:
        """Finds the sandbox of this machine."""
        with contextlib.suppress(SandboxUnavailable):
            self._backend = await asyncio.to_thread(strongest)
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Ends the sandboxes."""
        for key in list(self._running):
            await self._end(key)

    def package(self, service: str) -> TaskPackage | None:
        """The package of an own task; None for tasks of other kinds."""
        return self._of_service.get(service)

    async def claim(self, task: Task) -> Claim:
        """Builds the claim of an own task, and attaches its package. Raises `TaskError`."""
        package = self._of_service[task.service]
        await self._attach(package)
        own = self._accepted[package.digest].own
        _, split, index = task.id.rsplit("/", 2)
        if own is None or split not in [one.value for one in Split] or not index.isdecimal():
            raise TaskError(f"{task.id}: expected NAME/SPLIT/INDEX, as tasks of the SDK are called")
        try:
            seed, question = await asyncio.to_thread(own.origin, Split(split), int(index))
        except Exception as error:  # the author's code raises what it will
            raise TaskError(f"{task.id}: {described(error)}") from error
        receipt = Receipt(package.name, package.digest, _settings(own), seed, 0)
        return Claim(own.name, question.text, question.answer, receipt, libraries(), package.digest)

    async def _attach(self, package: TaskPackage) -> None:
        """Gives the package to the swarm, now and then: a server forgets. A server that is away gets it later."""
        now_s = asyncio.get_running_loop().time()
        if self._attachments is None or self._identity is None:
            return
        if now_s - self._attached_s.get(package.digest, -math.inf) >= ATTACH_EVERY_S:
            with contextlib.suppress(ExchangeUnavailable):
                await self._attachments.attach(package.digest, sealed(package, self._identity))
                self._attached_s[package.digest] = now_s

    async def task(self, claim: Claim) -> Task | Reason:
        """Finds the training task of a claim by drawing its seed again."""
        receipt = claim.receipt
        if receipt is None or receipt.dataset_version != claim.package or len(receipt.config) > MOST_SETTINGS:
            return Reason.UNKNOWN_TASK
        try:
            accepted = await self._package(claim.package)
        except TaskError:
            return Reason.NOT_SENT
        if accepted is None:
            return Reason.UNKNOWN_TASK
        try:
            loaded = await self._loaded(accepted, receipt.config)
            drawn = await self._ask(accepted, receipt.config, DrawSeed(receipt.seed), QuestionReply)
            question = drawn.question
            task = accepted.named().task_of(question, f"{receipt.dataset}/{receipt.seed}")
        except TimeoutError:
            return Reason.TIMED_OUT
        except (TaskError, ChildDied, ValueError, KeyError):
            return Reason.NOT_DRAWN
        if len(question.text) + len(question.answer or "") > self._bounds.draw_characters:
            return Reason.OUT_OF_BOUNDS
        if (question.text, question.answer) != (claim.question, claim.truth):
            if claim.libraries != libraries():
                return Reason.OTHER_LIBRARIES
            return Reason.WRONG_TRUTH if question.text == claim.question else Reason.WRONG_QUESTION
        named = accepted.named()
        eval_share = named.eval_share if accepted.own else loaded.eval_share
        if split_of(named.split_text(question), eval_share) is Split.EVAL:
            return Reason.HELD_OUT
        if not (loaded.converses or loaded.scores) and not is_confined(task_spec(task)):
            return Reason.UNKNOWN_TASK
        return task

    async def course(self, claim: Claim, task: Task, rollout: OfferedRollout) -> Course | Reason:
        """Plays an offered rollout again. Its requests must be the messages of the offer."""
        accepted = await self._package(claim.package)
        assert accepted is not None, "the task came of it"
        assert claim.receipt is not None
        sampled = [turn.message for turn in rollout.turns if turn.sampled]
        answers = tuple(sampled) if rollout.turns else (Message(Role.ASSISTANT, rollout.text),)
        try:
            loaded = await self._loaded(accepted, claim.receipt.config)
            if not rollout.turns and not loaded.converses and not loaded.scores:
                return Course()
            course = await self._ask(accepted, claim.receipt.config, PlayAgain(task, answers), Course)
            if course.reward is None and loaded.scores:
                scored = await self._ask(accepted, claim.receipt.config, ScoreAnswer(task, course.answer or ""), Reward)
                course = replace(course, reward=scored)
        except TimeoutError:
            return Reason.TIMED_OUT
        except _OtherCourse:
            return Reason.OTHER_COURSE
        except (TaskError, ChildDied):
            return Reason.UNSCORED
        if course.reward is not None and course.reward.status is not RewardStatus.SCORED:
            return Reason.UNSCORED
        said = [turn.message for turn in rollout.turns] if rollout.turns else list(answers)
        return course if _asked_as_said(task, said, rollout, course) else Reason.OTHER_COURSE

    async def read(self, service: str, question: str, attachments: Sequence[bytes]) -> Question | Reason:
        """Has the reader of an own task make its question of a peer's, in the sandbox."""
        package = self._of_service.get(service)
        if package is None:
            return Reason.UNKNOWN_TASK
        accepted = self._accepted[package.digest]
        assert accepted.own is not None, "it is an own task"
        request = ReadAttachments(question, tuple(attachments))
        try:
            return (await self._ask(accepted, _settings(accepted.own), request, QuestionReply)).question
        except TimeoutError:
            return Reason.TIMED_OUT
        except (TaskError, ChildDied, ValueError, KeyError):
            return Reason.UNREADABLE

    async def _package(self, digest: str) -> _Accepted | None:
        """The accepted package with a digest; None for any other. Raises `TaskError` where nobody has it."""
        if digest in self._accepted or digest not in self._wanted:
            return self._accepted.get(digest)
        file = None if self._folder is None else self._folder / f"{digest}.shoal-task"
        data = file.read_bytes() if file is not None and file.is_file() else None
        fetched = data is None and self._attachments is not None
        if fetched and self._attachments is not None:
            with contextlib.suppress(ExchangeUnavailable):
                data = await self._attachments.fetch(digest, MAX_PACKAGE_BYTES)
        if data is None:
            raise TaskError(f"{self._wanted[digest]}@{digest}: nobody sends this task package")
        try:
            package, _ = unsealed(data)
        except WireError as error:
            raise TaskError(str(error)) from None
        if (package.name, package.digest) != (self._wanted[digest], digest):
            raise TaskError(f"expected the task package {self._wanted[digest]}@{digest}, got {package.reference}")
        if fetched and file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replaced(file) as unfinished:
                unfinished.write_bytes(data)
        self._accepted[digest] = _Accepted(package)
        return self._accepted[digest]

    async def _loaded(self, accepted: _Accepted, config: str) -> Loaded:
        """The abilities of a package with settings, loaded in its sandbox. Raises `TaskError`, `ChildDied`."""
        async with self._turn:
            return (await self._sandbox(accepted, config)).loaded

    async def _sandbox(self, accepted: _Accepted, config: str) -> _Running:
        key = accepted.package.digest, config
        if key not in self._running:
            while len(self._running) >= MOST_WORKERS:
                await self._end(next(iter(self._running)))
            child = _Sandbox("task package", WORKER, [], Path(os.devnull), self._backend)
            await child.__aenter__()
            try:
                await child.ready(START_TIMEOUT_S)
                rewrite = tuple((one, other) for one, other in accepted.named().rewrite)
                load = wire.encode(LoadPackage(accepted.package, config, rewrite))
                loaded = _value(await child.ask(load, START_TIMEOUT_S), Loaded)
            except BaseException:
                child.kill()
                await child.end()
                raise
            self._running[key] = _Running(child, loaded)
        self._running.move_to_end(key)
        return self._running[key]

    async def _ask(self, accepted: _Accepted, config: str, request: Request, kind: type[T]) -> T:
        """A reply of a package. Raises `TimeoutError`, `TaskError` or `ChildDied`; a silent sandbox ends."""
        async with self._turn:
            running = await self._sandbox(accepted, config)
            try:
                return _value(await running.child.ask(wire.encode(request), self._bounds.draw_s), kind)
            except (TimeoutError, ChildDied, asyncio.CancelledError):
                await self._end((accepted.package.digest, config))
                raise

    async def _end(self, key: tuple[str, str]) -> None:
        running = self._running.pop(key)
        running.child.kill()
        await running.child.end()


def _asked_as_said(task: Task, said: Sequence[Message], rollout: OfferedRollout, course: Course) -> bool:
    """Tells whether each request was the question and the messages before the answer that followed."""
    if not rollout.turns:
        return all(asked.messages == task.messages for asked in course.asked)
    places = [place for place, turn in enumerate(rollout.turns) if turn.sampled]
    if len(places) != len(course.asked) or places[-1] != len(said) - 1:
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
        reply = wire.decode(frame, PackageReply, MOST_REPLY_BYTES)
        if reply.error:
            raise _OtherCourse(reply.error) if reply.other_course else TaskError(reply.error[:500])
        decoder: Any = msgspec.msgpack.decode
        return decoder(reply.value, type=kind)  # type: ignore[no-any-return]
    except (WireError, msgspec.MsgspecError, ValueError) as error:
        raise TaskError(f"task package: {error}") from error
