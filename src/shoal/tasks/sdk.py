"""Environments of authors: a class with the methods below, or only a function that draws questions.

    @environment("sums", version="1")
    class Sums:
        def draw(self, rng):                              # -> Question, or a text
            a, b = rng.randrange(100), rng.randrange(100)
            return Question(f"What is {a} + {b}?", answer=str(a + b))

        async def rollout(self, task, model):             # optional: many turns, tools, any agent framework
            said = await model.answer(task.messages)
            return said.content                           # -> the answer, a reward, an Outcome, or nothing

        def score(self, task, answer):                    # optional: else the checker that the question names
            return float(answer.strip() == task.answer)

        def scores(self, task, answers):                  # instead of `score`: a whole group, to compare its answers
            return [len(set(answers)) / len(answers)] * len(answers)

`draw` gets a generator whose seed is the hash of the environment's name, the split and the index. A question that
belongs to the other split by its text is drawn again. So draws repeat, and held-out questions stay held out.
Methods may be `async` or not; plain methods run in threads. Each process that serves the class makes one object of it.
"""

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from shoal import checker
from shoal.errors import TaskError
from shoal.interfaces import Environment, Model
from shoal.plugins import described, in_thread, numbers_of, own_code
from shoal.tasks.holdout import EVAL_SHARE, Epochs, first_of, prompt, rewritten
from shoal.types import Json, Message, Outcome, Receipt, Reward, RewardStatus, Role, Split, Task, seed_for
from shoal.wire import sendable


class EnvironmentFailed(Exception):
    """The environment failed, not the policy: the rollout is not trained with.

    With `retry` another attempt may help, and is made. Any other exception counts as this one without `retry`.
    """

    def __init__(self, reason: str, *, retry: bool = False) -> None:
        super().__init__(reason)
        self.retry = retry


class PolicyFailed(Exception):
    """The policy made it impossible to go on: the rollout ends here and is trained with a reward of 0."""


class Beginning:
    """A state that the rollouts of one group share: the first reaches it, and the others may go on from there."""

    def __init__(self, ended: contextlib.AsyncExitStack) -> None:
        """`ended` is closed once no rollout of the group runs any more."""
        self._ended = ended
        self._state: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def state(self) -> object:
        """The state, once the first rollout has reached it; None when it ends without."""
        return await asyncio.shield(self._state)

    def reached(self, state: object, close: Callable[[], object]) -> None:
        """Has the others go on from a state, which is closed in a thread at the group's end."""
        self._ended.push_async_callback(asyncio.to_thread, close)
        if not self._state.done():  # another attempt of the first rollout may have reached one
            self._state.set_result(state)

    def ends(self) -> None:
        """Lets those that wait begin for themselves."""
        if not self._state.done():
            self._state.set_result(None)


BEGINNING: ContextVar[tuple[Beginning, bool] | None] = ContextVar("beginning", default=None)
"""Beginning of the rollout's group, and whether the rollout is the first; None outside of a group that trains."""


@dataclass(frozen=True, slots=True)
class Question:
    """A task's question. Without `score` and `rollout` a checker scores; `scorer` is as in a configuration."""

    text: str
    answer: str | None = None
    scorer: Json = None
    system: str = ""
    info: Json = None
    receipt: Receipt | None = None
    split_by: str = ""
    """The text that decides the split; the question's text, as it is asked, when empty."""


@dataclass(frozen=True)
class Definition(Environment):
    """An environment of an author who wrote `draw` and perhaps `rollout`, `score`, `scores` or `check`."""

    name: str
    author: Any
    version: str = "1"
    eval_share: float = EVAL_SHARE
    max_running: int | None = None
    timeout_s: float = 300.0
    seed: int = 0
    """Moves the training questions only."""
    system_prompt: str = ""
    """Precedes questions that have no system message."""
    rewrite: Sequence[tuple[str, str]] = ()
    """Pairs that shorten each message of the task to the model."""

    def __post_init__(self) -> None:
        if not self._wrote("draw"):
            raise TaskError(f"{self.name}: expected a method `draw`, found none in {type(self.author).__name__}")

    def _wrote(self, name: str) -> bool:
        return callable(getattr(self.author, name, None))

    @property
    def source(self) -> object:
        """The author's class or function; other processes find the task by its name."""
        inner = self.author.draw if isinstance(self.author, _Drawing) else self.author
        return inner if inspect.isfunction(inner) else type(inner)

    @property
    def questions(self) -> Sequence[Task]:
        """All training tasks of an author who draws a fixed set in epochs; empty for any other."""
        epochs = getattr(self.author, "epochs", None)
        found = epochs.of[Split.TRAIN] if isinstance(epochs, Epochs) else ()
        return [dataclasses.replace(task, service=self.name) for task in found]

    @property
    def converses(self) -> bool:
        """True if the author wrote `rollout`."""
        return self._wrote("rollout")

    @property
    def scores(self) -> bool:
        """True if the author wrote `score` or `scores`."""
        return self._wrote("score") or self._wrote("scores")

    def check(self) -> None:
        """Calls the author's `check`, if there is one."""
        if self._wrote("check"):
            self.author.check()

    def given(self, params: Mapping[str, Json]) -> "Definition":
        """A copy whose author, a `msgspec.Struct` or dataclass, has these fields. Raises `TaskError`."""
        if not params:
            return self
        kind = type(self.author)
        if unknown := params.keys() - inspect.signature(kind).parameters.keys():
            raise TaskError(f"tasks.{self.name}.params: the task has no field {', '.join(sorted(unknown))}")
        try:
            return dataclasses.replace(self, author=msgspec.convert(params, kind))
        except (msgspec.ValidationError, TypeError) as error:
            raise TaskError(f"tasks.{self.name}.params: {checker.table_complaint(error, kind)}") from None

    def draw(self, split: Split, index: int) -> Task:
        """The task at an index. Raises `TaskError` when no question is found that belongs to the split."""
        if list(inspect.signature(self.author.draw).parameters)[:2] == ["split", "index"]:
            task: Task = self.author.draw(split, index)
            return dataclasses.replace(task, service=self.name)
        return self.task_of(self.origin(split, index)[1], f"{self.name}/{split}/{index}")

    def origin(self, split: Split, index: int) -> tuple[int, Question]:
        """The question at an index, and the seed from which `question_of` draws it again. Raises `TaskError`."""
        run = (self.seed,) if self.seed and split is Split.TRAIN else ()

        def drawn() -> Iterator[tuple[str, tuple[int, Question]]]:
            for attempt in itertools.count():
                seed = seed_for("task", self.name, *run, split, index, attempt)
                question = self.question_of(seed)
                yield self.split_text(question), (seed, question)

        return first_of(split, self.eval_share, drawn(), self.name)

    def question_of(self, seed: int) -> Question:
        """The author's question for a seed, before it is rewritten."""
        given = self.author.draw(random.Random(seed))
        return given if isinstance(given, Question) else Question(str(given))

    def split_text(self, question: Question) -> str:
        """The text that decides the split of a question."""
        return question.split_by or question.text

    async def rollout(self, task: Task, model: Model) -> Outcome:
        """Runs the author's rollout, and scores it here when it gives only the answer."""
        if self.rewrite:
            model = _Rewriting(model, len(task.messages), self.rewrite)
        outcome = outcome_of(await called(self.author.rollout, task, model))
        if outcome.reward is None and outcome.answer is not None and self.scores:
            (reward,) = await self.score(task, [outcome.answer])
            if reward.status is not RewardStatus.SCORED:
                raise EnvironmentFailed(reward.evidence)
            return dataclasses.replace(outcome, reward=reward.value)
        return outcome

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""
        if self._wrote("scores"):
            return await self._scored(self.author.scores, task, answers)
        return [reward for answer in answers for reward in await self._scored(self.author.score, task, answer)]

    async def _scored(self, method: Callable[..., object], task: Task, said: Sequence[str]) -> list[Reward]:
        """The rewards of some answers together, or of one that is a text."""
        n = 1 if isinstance(said, str) else len(said)
        try:
            given: Any = await called(method, task, said)
            values = [given] if isinstance(said, str) else given
            if isinstance(values, Sequence) and len(values) == n and any(isinstance(one, Reward) for one in values):
                rewards = (one if isinstance(one, Reward) else Reward(float(one)) for one in values)
                return [dataclasses.replace(one, evidence=sendable(one.evidence)) for one in rewards]
            numbers = numbers_of(values, n)
            if None in numbers:
                raise ValueError("expected a number for each answer, got None")
            return [Reward(number) for number in numbers if number is not None]
        except Exception as error:  # an author's code may raise anything: its failure is a status
            return [Reward(0.0, RewardStatus.FAILED, evidence=f"{self.name}: {described(error)}")] * n

    def task_of(self, question: Question, task_id: str) -> Task:
        """The task of a question, rewritten and with this task's system prompt. Raises `TaskError`."""
        info: dict[str, Json] = {} if question.info is None else {"info": question.info}
        if question.scorer is not None:
            spec = checker.spec_of(question.scorer, f"{self.name}: scorer")
            info["scorer"] = checker.to_json(spec)
        return Task(
            task_id,
            self.name,
            prompt(question.system or self.system_prompt, rewritten(question.text, self.rewrite)),
            question.answer,
            json.dumps(info),
            question.receipt,
        )


@dataclass(frozen=True, slots=True)
class _Rewriting:
    """Implements `interfaces.Model`: shortens what a rollout says to the model after the question."""

    model: Model
    drawn: int
    """Messages of the question, which are rewritten when it is drawn."""
    rewrite: Sequence[tuple[str, str]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    async def answer(self, messages: Sequence[Message], *, tools: str = "", max_tokens: int | None = None) -> Message:
        later = [
            dataclasses.replace(one, content=rewritten(one.content, self.rewrite)) if one.role is Role.USER else one
            for one in messages[self.drawn :]
        ]
        return await self.model.answer([*messages[: self.drawn], *later], tools=tools, max_tokens=max_tokens)


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Wraps a function that draws in a class."""

    draw: Callable[..., Question | str]


def environment(
    name: str,
    *,
    version: str = "1",
    eval_share: float = EVAL_SHARE,
    max_running: int | None = None,
    timeout_s: float = 300.0,
) -> Callable[[object], Definition]:
    """Decorates a class, or a function that draws, as an environment.

    `max_running` is the number of rollouts at once in one process, `timeout_s` the seconds that one rollout may take.
    """

    def decorated(author: object) -> Definition:
        made = (
            author() if inspect.isclass(author) else _Drawing(cast(Callable[[random.Random], Question | str], author))
        )
        return Definition(name, made, version, eval_share, max_running, timeout_s)

    return decorated


def definition_at(path: str) -> Definition:
    """The environment that `module:name` names. Raises `ConfigError` and `TaskError`.

    The name may be of a decorated class or function, a `Definition`, a callable that returns a `Definition`, or an
    object with a name that draws `Task`s by split and index.
    """
    found = own_code("task", path)
    if not isinstance(found, Definition) and callable(found):
        try:
            found = found()
        except TypeError as error:
            raise TaskError(f"task: {path!r} is not an environment: {error}") from error
    if isinstance(found, Definition):
        return found
    if isinstance(name := getattr(found, "name", None), str) and callable(getattr(found, "draw", None)):
        return Definition(name, found)
    raise TaskError(f"task: {path!r} is not an environment; decorate it with shoal.environment")


def outcome_of(said: object) -> Outcome:
    """Converts the result of an author's rollout or of an agent: None, an answer, a reward or an outcome."""
    if isinstance(said, Outcome):
        return said
    if said is None:
        return Outcome()
    return Outcome(answer=said) if isinstance(said, str) else Outcome(reward=float(cast(float, said)))


async def called(method: Callable[..., object], *arguments: object, **named: object) -> object:
    """Calls an author's method; a method that is not `async` runs in a thread, where it may take its time."""
    try:
        if inspect.iscoroutinefunction(method):
            return await cast(Awaitable[object], method(*arguments, **named))
        given = await in_thread(method, *arguments, **named)
        return await given if inspect.isawaitable(given) else given
    except SystemExit as error:  # it would end the event loop
        raise RuntimeError(described(error)) from error
