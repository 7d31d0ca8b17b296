"""Tasks of authors: a class with the methods below, or only a function that draws questions.

    @task("sums", version="1")
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

`draw` gets a generator whose seed is the hash of the task's name, the split and the index. A question that belongs to
the other split by its text is drawn again. Draws are therefore repeatable, and held-out questions stay held out.
Methods may be `async` or not; plain methods run in threads. Each process that serves the class makes one object of it.
"""

import asyncio
import dataclasses
import inspect
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from shoal import checker
from shoal.errors import TaskError
from shoal.interfaces import Chat, TaskService
from shoal.plugins import described, own_code
from shoal.tasks.holdout import prompt, split_of
from shoal.tasks.remote_protocol import Capability
from shoal.types import Json, Outcome, Receipt, Reward, RewardStatus, Split, Task, seed_for

MOST_ATTEMPTS = 256


class EnvironmentFailed(Exception):
    """The environment failed, not the policy: the rollout is not trained with.

    With `retry` another attempt may help, and is made. Any other exception counts as this one without `retry`.
    """

    def __init__(self, reason: str, *, retry: bool = False) -> None:
        super().__init__(reason)
        self.retry = retry


class PolicyFailed(Exception):
    """The policy made it impossible to go on: the rollout ends here and is trained with a reward of 0."""


class Model(Chat, Protocol):
    """The model of a rollout: call `answer`, or give the URL and the key to any client of OpenAI or Anthropic."""

    @property
    def base_url(self) -> str:
        """URL for OpenAI's clients; Anthropic's clients want it without `/v1`."""
        ...

    @property
    def api_key(self) -> str:
        """The session's key."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """A task's question. Without `score` and `rollout` a checker scores; `scorer` is as in a configuration."""

    text: str
    answer: str | None = None
    scorer: Json = None
    system: str = ""
    info: Json = None
    receipt: Receipt | None = None


class Definition:
    """A task of an author, as the rest of Shoal sees it."""

    def __init__(
        self,
        name: str,
        author: object,
        *,
        version: str = "1",
        eval_share: float = 0.2,
        max_running: int = 64,
        timeout_s: float = 300.0,
    ) -> None:
        """`author` has `draw`, and perhaps `rollout` and `score` or `scores`. Raises `TaskError`."""
        if not callable(getattr(author, "draw", None)):
            raise TaskError(f"{name}: expected a method `draw`, found none in {type(author).__name__}")
        self._name, self.version, self.max_running, self.timeout_s = name, version, max_running, timeout_s
        self._author = author
        self._eval_share = eval_share
        self._draws_tasks = list(inspect.signature(author.draw).parameters)[:2] == ["split", "index"]  # type: ignore[attr-defined]

    @property
    def name(self) -> str:
        """Unique within a run."""
        return self._name

    @property
    def author(self) -> object:
        """The author's class or function; other processes find the task by its name."""
        inner = self._author.draw if isinstance(self._author, _Drawing) else self._author
        return inner if inspect.isfunction(inner) else type(inner)

    @property
    def capabilities(self) -> list[Capability]:
        """Capabilities that the author wrote methods for."""
        known = {Capability.DRAW: ["draw"], Capability.ROLLOUT: ["rollout"], Capability.SCORE: ["score", "scores"]}
        return [capability for capability, names in known.items() if any(map(self._wrote, names))]

    def _wrote(self, name: str) -> bool:
        return callable(getattr(self._author, name, None))

    def has(self, capability: Capability) -> bool:
        """True if the author wrote a method for the capability."""
        return capability in self.capabilities

    def renamed(self, name: str, max_running: int) -> "Definition":
        """A copy of the definition under another name, which draws other questions of the kind."""
        return Definition(
            name,
            self._author,
            version=self.version,
            eval_share=self._eval_share,
            max_running=max_running,
            timeout_s=self.timeout_s,
        )

    def draw(self, split: Split, index: int) -> Task:
        """The task at an index. Raises `TaskError` when no question is found that belongs to the split."""
        if self._draws_tasks:
            task = cast(TaskService, self._author).draw(split, index)
            return dataclasses.replace(task, service=self._name)
        for attempt in range(MOST_ATTEMPTS):
            seed = seed_for("task", self._name, split, index, attempt)
            drawn = self._author.draw(random.Random(seed))  # type: ignore[attr-defined]
            question = drawn if isinstance(drawn, Question) else Question(str(drawn))
            if split_of(question.text, self._eval_share) is split:
                return self._task(question, split, index)
        raise TaskError(f"{self._name}: none of {MOST_ATTEMPTS} questions drawn belongs to the {split} split")

    async def rollout(self, task: Task, model: Model) -> Outcome:
        """Runs the author's rollout, and scores it here when it gives only the answer."""
        outcome = outcome_of(await _call(self._author.rollout, task, model))  # type: ignore[attr-defined]
        if outcome.reward is None and outcome.answer is not None and Capability.SCORE in self.capabilities:
            (reward,) = await self.score(task, [outcome.answer])
            if reward.status is not RewardStatus.SCORED:
                raise EnvironmentFailed(reward.evidence)
            return dataclasses.replace(outcome, reward=reward.value)
        return outcome

    async def play(self, task: Task, chat: Chat) -> Outcome:
        """Implements `interfaces.Playable.play` with the author's rollout."""
        return await self.rollout(task, cast(Model, chat))

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""
        if self._wrote("scores"):
            return await self._scored_together(task, answers)
        return [await self._scored(task, answer) for answer in answers]

    async def _scored(self, task: Task, answer: str) -> Reward:
        try:
            return _reward(await _call(self._author.score, task, answer))  # type: ignore[attr-defined]
        except Exception as error:  # an author's code may raise anything: its failure is a status
            return self._unscored(error)

    async def _scored_together(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        try:
            given = await _call(self._author.scores, task, answers)  # type: ignore[attr-defined]
            rewards = [_reward(one) for one in cast(Sequence[object], given)]
            if len(rewards) != len(answers):
                raise ValueError(f"scores: expected {len(answers)} rewards, got {len(rewards)}")
        except Exception as error:  # as above
            return [self._unscored(error)] * len(answers)
        return rewards

    def _unscored(self, error: Exception) -> Reward:
        return Reward(0.0, RewardStatus.FAILED, evidence=f"{self._name}: {described(error)}")

    def _task(self, question: Question, split: Split, index: int) -> Task:
        info: dict[str, Json] = {} if question.info is None else {"info": question.info}
        if question.scorer is not None:
            spec = checker.spec_of(question.scorer, f"{self._name}: scorer")
            info["scorer"] = checker.to_json(spec)
        return Task(
            f"{self._name}/{split}/{index}",
            self._name,
            prompt(question.system, question.text),
            question.answer,
            json.dumps(info),
            question.receipt,
        )


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Wraps a function that draws in a class."""

    draw: Callable[[random.Random], Question | str]


def task(
    name: str, *, version: str = "1", eval_share: float = 0.2, max_running: int = 64, timeout_s: float = 300.0
) -> Callable[[object], Definition]:
    """Decorates a class, or a function that draws, as a task.

    `max_running` is the number of rollouts at once in one process, `timeout_s` the seconds that one rollout may take.
    """

    def decorated(author: object) -> Definition:
        made = (
            author() if inspect.isclass(author) else _Drawing(cast(Callable[[random.Random], Question | str], author))
        )
        return Definition(
            name, made, version=version, eval_share=eval_share, max_running=max_running, timeout_s=timeout_s
        )

    return decorated


def definition_at(path: str) -> Definition:
    """The task that `module:name` names. Raises `ConfigError` and `TaskError`.

    The name may be of a decorated class or function, a `Definition`, a callable that returns a `Definition`, or a task
    service that draws `Task`s by split and index.
    """
    found = own_code("task", path)
    if not isinstance(found, Definition) and callable(found):
        try:
            found = found()
        except TypeError as error:
            raise TaskError(f"task: {path!r} is no task: {error}") from error
    if isinstance(found, Definition):
        return found
    if isinstance(getattr(found, "name", None), str) and callable(getattr(found, "draw", None)):
        return Definition(cast(TaskService, found).name, found)
    raise TaskError(f"task: {path!r} is no task; decorate it with shoal.tasks.sdk.task")


def outcome_of(said: object) -> Outcome:
    """Converts the result of an author's rollout or of an agent: None, an answer, a reward or an outcome."""
    if isinstance(said, Outcome):
        return said
    if said is None:
        return Outcome()
    return Outcome(answer=said) if isinstance(said, str) else Outcome(reward=float(cast(float, said)))


def _reward(given: object) -> Reward:
    return given if isinstance(given, Reward) else Reward(float(cast(float, given)))


async def _call(method: Callable[..., object], *arguments: object) -> object:
    """Calls an author's method; a method that is not `async` runs in a thread, where it may take its time."""
    if inspect.iscoroutinefunction(method):
        return await cast(Awaitable[object], method(*arguments))
    given = await asyncio.to_thread(method, *arguments)
    return await given if inspect.isawaitable(given) else given
