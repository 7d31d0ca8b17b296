"""Runs the code of own tasks in a sandbox: `python -m shoal.swarm.trust.python_worker --fd N`. It may be killed.

It draws questions, plays conversations again with the answers of a peer, and scores. It has no network,
no files but its libraries, no processes and no threads: plain methods of an author run on the one thread.
"""

import asyncio
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack

import msgspec

from shoal import wire
from shoal.net.process import from_parent, send_frame, serve
from shoal.plugins import described
from shoal.sandbox.confinement import confine
from shoal.swarm.wire.offer import AskedFor, Course
from shoal.tasks.holdout import split_of
from shoal.tasks.procedural_client import Redrawn
from shoal.tasks.sdk import Definition, EnvironmentFailed, PolicyFailed, Question
from shoal.types import Message, Reward, Role, Task

T = TypeVar("T")
Args = TypeVarTuple("Args")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Variables under which libraries ask for no thread, which this process could not start."""
TOOLS, SCHEMAS = "converse", "transformers.utils"
"""Name in a source that describes tools to its model, and the module that does it."""


class OtherCourse(Exception):
    """The environment asks for more answers than the conversation has."""


class LoadTask(msgspec.Struct, tag="load", frozen=True):
    """Loads a task; the first request for it. `text` is its module's source, `entry` its name there."""

    name: str
    module: str
    entry: str
    text: str
    settings: str
    """JSON object of the author's fields."""
    system_prompt: str
    rewrite: tuple[tuple[str, str], ...]
    eval_share: float


class DrawSeed(msgspec.Struct, tag="draw"):
    """Asks for the `Redrawn` question of a seed; `id` becomes the id of its task."""

    name: str
    seed: int
    id: str


class PlayAgain(msgspec.Struct, tag="play"):
    """Asks for the `Course` of a conversation in which the model gives these answers."""

    name: str
    task: Task
    answers: tuple[Message, ...]


class TaskReply(msgspec.Struct):
    """The result of a request, or an error."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""
    other_course: bool = False


class _InlineLoop(asyncio.SelectorEventLoop):
    """Event loop without threads: what would run in one runs at once."""

    def run_in_executor(self, executor: object, func: Callable[[Unpack[Args]], T], *args: *Args) -> "asyncio.Future[T]":
        """Calls the function."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
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
    """The loaded tasks by name, and the event loop on which they run."""

    def __init__(self) -> None:
        self._loop = _InlineLoop()  # before the confinement, which refuses its socket pair
        self._tasks: dict[str, Definition] = {}

    def reply(self, frame: bytes) -> bytes:
        """The reply to a request. An exception of the task's code is an error."""
        requests: Any = LoadTask | DrawSeed | PlayAgain
        try:
            value = self._value(wire.decode(frame, requests))
            return wire.encode(TaskReply(msgspec.Raw(msgspec.msgpack.encode(value))))
        except OtherCourse:
            return wire.encode(TaskReply(error="the environment asks for more answers", other_course=True))
        except (Exception, SystemExit) as error:  # an author's code raises what it will
            return wire.encode(TaskReply(error=described(error) or type(error).__name__))

    def _value(self, request: LoadTask | DrawSeed | PlayAgain) -> object:
        if isinstance(request, LoadTask):
            self._tasks[request.name] = _loaded(request)
            return True
        task = self._tasks[request.name]
        if isinstance(request, DrawSeed):
            return _drawn(task, task.question_of(request.seed), request.id)
        return self._loop.run_until_complete(_played(task, request))


def _loaded(request: LoadTask) -> Definition:
    module = ModuleType(request.module)  # the sandbox has not the author's files
    module.__package__ = request.module.rpartition(".")[0]
    sys.modules[request.module] = module
    exec(compile(request.text, f"{request.module}.py", "exec"), module.__dict__)  # this node's own code
    if TOOLS in request.text:
        importlib.import_module(SCHEMAS)  # takes longer than a conversation may
    found = getattr(module, request.entry)
    if not isinstance(found, Definition):
        raise TypeError(f"expected a task of shoal.tasks.sdk, got {type(found).__name__}")
    settings = {name: getattr(request, name) for name in ("name", "system_prompt", "rewrite", "eval_share")}
    return dataclasses.replace(found, **settings).given(json.loads(request.settings))


def _drawn(task: Definition, question: Question, id_: str) -> Redrawn:
    return Redrawn(question.text, task.task_of(question, id_), split_of(task.split_text(question), task.eval_share))


async def _played(task: Definition, request: PlayAgain) -> Course:
    model, reward = _Replay(request.answers), None
    turn_rewards: tuple[float, ...] = ()
    said = [one.content for one in request.answers if one.role is Role.ASSISTANT]
    answer = said[-1] if said else ""
    if task.converses:
        try:
            outcome = await task.rollout(request.task, model)
        except PolicyFailed as failure:
            return Course(tuple(model.asked), Reward(0.0, evidence=str(failure)[:200]))
        reward = None if outcome.reward is None else Reward(outcome.reward)
        answer = answer if outcome.answer is None else outcome.answer
        turn_rewards = outcome.turn_rewards
    else:
        model.asked.append(AskedFor(request.task.messages))
    if reward is None and task.scores:
        (reward,) = await task.score(request.task, [answer])
    return Course(tuple(model.asked), reward, answer, turn_rewards)


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
