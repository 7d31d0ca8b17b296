"""Runs the code of an own task in a sandbox: `python -m shoal.swarm.python_worker --fd N`. It may be killed.

It draws questions, plays a conversation again with the answers of a peer, scores, and reads attachments. It has no
network, no files but its libraries, no processes and no threads: plain methods of an author run on the one thread.
"""

import asyncio
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import msgspec

from shoal import wire
from shoal.net.process import from_parent, send_frame, serve
from shoal.plugins import described
from shoal.sandbox.confinement import confine
from shoal.swarm.offer import AskedFor, Course
from shoal.tasks.sdk import Definition, EnvironmentFailed, PolicyFailed, Question
from shoal.types import Message, Reward, Role, Task

T = TypeVar("T")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Variables under which libraries ask for no thread, which this process could not start."""
TOOLS, SCHEMAS = "converse", "transformers.utils"
"""Name in a source that describes tools to its model, and the module that does it."""


class OtherCourse(Exception):
    """The environment asks for more answers than the conversation has."""


class TaskSource(msgspec.Struct, frozen=True):
    """Source of a task: the name that its author gave it, its module's name, its name there, and the module's text."""

    name: str
    module: str
    entry: str
    text: str


class LoadTask(msgspec.Struct, tag="load"):
    """Runs the source of a task; the first request. `settings` are the task's as JSON."""

    source: TaskSource
    settings: str
    rewrite: tuple[tuple[str, str], ...]


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
    """A question of the task, with its values as JSON."""

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


class TaskReply(msgspec.Struct):
    """The result of a request, or an error."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""
    other_course: bool = False


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
        """Raises `EnvironmentFailed`: there is no server."""
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


class TaskHost:
    """The loaded task, and the event loop on which it runs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()  # before the confinement, which refuses its socket pair
        self._loop.set_default_executor(_Inline(1))
        self._task: Definition | None = None

    def reply(self, frame: bytes) -> bytes:
        """The reply to a request. An exception of the task's code is an error."""
        requests: Any = LoadTask | DrawSeed | PlayAgain | ScoreAnswer | ReadAttachments
        try:
            value = self._value(wire.decode(frame, requests))
            return wire.encode(TaskReply(msgspec.Raw(msgspec.msgpack.encode(value))))
        except OtherCourse:
            return wire.encode(TaskReply(error="the environment asks for more answers", other_course=True))
        except (Exception, SystemExit) as error:  # an author's code raises what it will
            return wire.encode(TaskReply(error=described(error) or type(error).__name__))

    def _value(self, request: LoadTask | DrawSeed | PlayAgain | ScoreAnswer | ReadAttachments) -> object:
        if isinstance(request, LoadTask):
            self._load(request)
            return True
        assert self._task is not None, "a task is loaded first"
        if isinstance(request, DrawSeed):
            return _replied(self._task.question_of(request.seed))
        if isinstance(request, ReadAttachments):
            return _replied(self._task.read(request.question, request.attachments))
        if isinstance(request, PlayAgain):
            return self._loop.run_until_complete(self._played(self._task, request))
        return self._loop.run_until_complete(self._task.score(request.task, [request.answer]))[0]

    def _load(self, request: LoadTask) -> None:
        source = request.source
        module = ModuleType(source.module)  # the sandbox has not the author's files
        module.__package__ = source.module.rpartition(".")[0]
        sys.modules[source.module] = module
        exec(compile(source.text, f"{source.module}.py", "exec"), module.__dict__)  # this node's own code
        if TOOLS in source.text:
            importlib.import_module(SCHEMAS)  # takes longer than a conversation may
        found = getattr(module, source.entry)
        if not isinstance(found, Definition):
            raise TypeError(f"expected a task of shoal.tasks.sdk, got {type(found).__name__}")
        self._task = dataclasses.replace(found, rewrite=request.rewrite).given(json.loads(request.settings))

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
    host = TaskHost()
    confine(boxed="--boxed" in arguments, sets_variables=True)
    os.environ |= ONE_THREAD
    sys.modules["torch"] = None  # type: ignore[assignment]  # it could not be loaded; libraries do without it
    send_frame(connection, b"")
    serve(connection, lambda frame: [host.reply(frame)])


if __name__ == "__main__":
    main()
