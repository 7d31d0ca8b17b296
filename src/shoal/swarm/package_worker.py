"""Runs the code of a task package in a sandbox: `python -m shoal.swarm.package_worker --fd N`. It may be killed.

It draws questions, plays a conversation again with the answers of a peer, scores, and reads attachments. It has no
network, no files but its libraries, no processes and no threads: plain methods of an author run on the one thread.
"""

import asyncio
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

import msgspec

from shoal import wire
from shoal.net.process import from_parent, send_frame, serve
from shoal.plugins import described
from shoal.sandbox.confinement import confine
from shoal.swarm.offer import AskedFor, Course
from shoal.swarm.task_package import TaskPackage
from shoal.tasks.sdk import Definition, EnvironmentFailed, PolicyFailed, Question
from shoal.types import Message, Reward, Role, Task

T = TypeVar("T")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Variables under which libraries ask for no thread, which this process could not start."""
TOOLS, SCHEMAS = "converse", "transformers.utils"
"""Name in a source that describes tools to its model, and the module that does it."""


class OtherCourse(Exception):
    """The environment asks for more answers than the conversation has."""


class LoadPackage(msgspec.Struct, tag="load"):
    """Imports a package; the first request. `params` are settings of the task as JSON, `rewrite` is this node's."""

    package: TaskPackage
    params: str
    rewrite: tuple[tuple[str, str], ...]


class Loaded(msgspec.Struct):
    """Abilities of the loaded task."""

    converses: bool
    scores: bool
    eval_share: float


class DrawSeed(msgspec.Struct, tag="draw"):
    """Asks for the question of a seed."""

    seed: int


class PlayAgain(msgspec.Struct, tag="play"):
    """Asks for the course of a conversation in which the model gives these answers."""

    task: Task
    answers: tuple[Message, ...]


class ScoreAnswer(msgspec.Struct, tag="score"):
    """Asks for the reward of one answer."""

    task: Task
    answer: str


class ReadAttachments(msgspec.Struct, tag="read"):
    """Asks for the task's own question for a peer's question with attachments."""

    question: str
    attachments: tuple[bytes, ...]


class QuestionReply(msgspec.Struct):
    """A question of the package, with its values as JSON."""

    text: str
    answer: str | None
    system: str
    split_by: str
    values: str
    """JSON object of scorer and info."""

    @property
    def question(self) -> Question:
        """The question. Raises `ValueError`."""
        values = json.loads(self.values)
        return Question(self.text, self.answer, values["scorer"], self.system, values["info"], None, self.split_by)


class PackageReply(msgspec.Struct):
    """The result of a request, or an error."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""
    other_course: bool = False


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds the modules of a package before those of this machine."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = modules

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Specification of a module of the package; None for any other."""
        if fullname not in self._modules:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=f"{fullname}.py")

    def get_source(self, fullname: str) -> str:
        """Source of a module."""
        return self._modules[fullname]


class _Parents(importlib.abc.MetaPathFinder):
    """Finds the folders above a package's modules that this machine has not."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = modules

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Specification of an empty folder above a module; None for any other name."""
        above = any(name.startswith(f"{fullname}.") for name in self._modules)
        return importlib.machinery.ModuleSpec(fullname, None, is_package=True) if above else None


class _Inline(ThreadPoolExecutor):
    """Executor that runs everything at once, on the calling thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Calls the function."""
        done = Future[T]()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # the author's code raises what it will, where it awaits this
            done.set_exception(error)
        return done


class _Replay:
    """Implements `interfaces.Model`: gives the offered answers, one after the other, and notes each request."""

    api_key = ""

    def __init__(self, answers: Sequence[Message]) -> None:
        self._answers = answers
        self.asked: list[AskedFor] = []

    @property
    def base_url(self) -> str:
        """Raises `EnvironmentFailed`: nobody listens."""
        raise EnvironmentFailed("a conversation that is played again has no URL")

    anthropic_base_url = base_url

    async def answer(self, messages: Sequence[Message], *, tools: str = "", max_tokens: int | None = None) -> Message:
        """The next offered answer. Raises `OtherCourse` after the last."""
        if len(self.asked) == len(self._answers):
            raise OtherCourse
        self.asked.append(AskedFor(tuple(messages), tools))
        return self._answers[len(self.asked) - 1]

    def openai(self) -> NoReturn:
        """Raises `EnvironmentFailed`: there is no server to speak with."""
        raise EnvironmentFailed("a conversation that is played again has no server")


class PackageHost:
    """The loaded task, and the event loop on which it runs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()  # before the confinement, which refuses its socket pair
        self._loop.set_default_executor(_Inline(1))
        self._task: Definition | None = None

    def reply(self, frame: bytes) -> bytes:
        """The reply to a request. An exception of the package's code is an error."""
        requests: Any = LoadPackage | DrawSeed | PlayAgain | ScoreAnswer | ReadAttachments
        try:
            value = self._value(wire.decode(frame, requests))
            return wire.encode(PackageReply(msgspec.Raw(msgspec.msgpack.encode(value))))
        except OtherCourse:
            return wire.encode(PackageReply(error="the environment asks for more answers", other_course=True))
        except (Exception, SystemExit) as error:  # a package's code raises what it will
            return wire.encode(PackageReply(error=described(error) or type(error).__name__))

    def _value(self, request: LoadPackage | DrawSeed | PlayAgain | ScoreAnswer | ReadAttachments) -> object:
        if isinstance(request, LoadPackage):
            return self._load(request)
        assert self._task is not None, "a package is loaded first"
        if isinstance(request, DrawSeed):
            return _replied(self._task.question_of(request.seed))
        if isinstance(request, ReadAttachments):
            return _replied(self._task.read(request.question, request.attachments))
        if isinstance(request, PlayAgain):
            return self._loop.run_until_complete(self._played(self._task, request))
        return self._loop.run_until_complete(self._task.score(request.task, [request.answer]))[0]

    def _load(self, request: LoadPackage) -> Loaded:
        sys.meta_path.insert(0, _Modules(request.package.modules))
        sys.meta_path.append(_Parents(request.package.modules))
        module, _, name = request.package.entry.partition(":")
        found = getattr(importlib.import_module(module), name)
        found = found() if not isinstance(found, Definition) and callable(found) else found
        if any(TOOLS in source for source in request.package.modules.values()):
            importlib.import_module(SCHEMAS)  # takes longer than a conversation may
        if not isinstance(found, Definition):
            raise TypeError(f"expected a task of shoal.tasks.sdk, got {type(found).__name__}")
        self._task = dataclasses.replace(found, rewrite=request.rewrite).given(json.loads(request.params))
        return Loaded(self._task.converses, self._task.scores, self._task.eval_share)

    async def _played(self, task: Definition, request: PlayAgain) -> Course:
        model = _Replay(request.answers)
        if not task.converses:
            said = request.answers[-1].content if request.answers else ""
            (scored,) = await task.score(request.task, [said])
            return Course((AskedFor(request.task.messages),), scored, said)
        try:
            outcome = await task.rollout(request.task, model)
        except PolicyFailed as failure:
            return Course(tuple(model.asked), Reward(0.0, evidence=str(failure)[:200]))
        reward = None if outcome.reward is None else Reward(outcome.reward)
        answer = outcome.answer
        if answer is None:
            answer = next((one.content for one in reversed(request.answers) if one.role is Role.ASSISTANT), "")
        return Course(tuple(model.asked), reward, answer, outcome.turn_rewards)


def _replied(one: Question) -> QuestionReply:
    values = json.dumps({"scorer": one.scorer, "info": one.info})
    return QuestionReply(one.text, one.answer, one.system, one.split_by, values)


def main() -> None:
    """Entry point of the process."""
    connection, arguments = from_parent()
    host = PackageHost()
    confine(boxed="--boxed" in arguments, sets_variables=True)
    os.environ |= ONE_THREAD
    sys.modules["torch"] = None  # type: ignore[assignment]  # it could not be loaded; libraries do without it
    send_frame(connection, b"")
    serve(connection, lambda frame: [host.reply(frame)])


if __name__ == "__main__":
    main()
