"""The scorer of a run: finds each task's checker, runs it in the right process, and caches its rewards.

    worker processes   every checker of text and truth: exact, number, math, regex, ..., reasoning_gym
    sandboxes          code
    separate process, unconfined   the user's functions
    this process       judge (a request to a model), and adding up weighted parts

Without workers, other machines do the first two (`shoal rewards serve`).
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, Self

import msgspec

from shoal import checker
from shoal.checker import Code, Function, LLMJudge, Spec, task_spec
from shoal.config import RewardConfig
from shoal.errors import TaskError
from shoal.interfaces import Scorer
from shoal.model.answer import THINK, boxed, parted, tagged
from shoal.reward.code_runner import CodeScorer, failed
from shoal.reward.llm_judge import JudgeScorer
from shoal.reward.remote import RemoteScorer
from shoal.reward.scorer import WINDOW, WorkerScorer, percentiles
from shoal.reward.user_functions import FunctionScorer
from shoal.types import Reward, RewardStatus, Task

MOST = 1 << 16
"""Number of rewards kept; some 20 MB."""


class RewardCache:
    """The most recently used rewards of deterministic checkers; only repeatable scores are kept."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._rewards: dict[bytes, Reward] = {}
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._rewards)

    def get(self, key: bytes) -> Reward | None:
        """The reward under a key, which becomes the most recently used."""
        reward = self._rewards.pop(key, None)
        if reward is not None:
            self._rewards[key] = reward
        self.hits += reward is not None
        self.misses += reward is None
        return reward

    def put(self, key: bytes, reward: Reward) -> None:
        """Keeps a repeatable score; a full cache drops the least recently used."""
        if reward.status is RewardStatus.SCORED and reward.is_repeatable:
            self._rewards[key] = reward
            if len(self._rewards) > self._most:
                del self._rewards[next(iter(self._rewards))]


def is_cacheable(spec: Spec) -> bool:
    """True if a checker always gives equal answers equal rewards, unlike a model's or a user's opinion."""
    return not isinstance(spec, LLMJudge | Function)


def key_of(spec: Spec, task: Task) -> bytes:
    """The key of all that decides a reward besides the answer: checker, parameters, truth or receipt, tests."""
    tests = task.info if isinstance(spec, Code) else ""
    content = (spec, task.answer, task.receipt, tests)
    return blake2b(msgspec.msgpack.encode(content), digest_size=16).digest()


def answer_key(task_key: bytes, answer: str) -> bytes:
    """The key of one answer."""
    return blake2b(answer.encode(errors="surrogatepass"), digest_size=16, key=task_key).digest()


MOST_ANSWER_BYTES = 1 << 20
"""Characters of an answer; a longer answer is worth 0."""
WHOLE = (checker.Format, checker.Length, checker.Language, checker.Function)
"""Checkers of the whole completion, thought included."""
UNBOXED = (checker.Exact, checker.Number, checker.ReasoningGym)
"""Checkers of a bare answer, without its box; `math` looks for boxes itself."""


class SpecScorer(Protocol):
    """Scores answers by a given checker."""

    async def score_by(self, spec: Spec, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""
        ...


class RewardService:
    """A `Scorer` for every checker. Use as an async context manager.

    Equal answers of a group, and answers seen before, are scored once.
    """

    def __init__(self, config: RewardConfig, log: Path = Path(os.devnull)) -> None:
        """`log` gets the output of worker processes until they are ready."""
        self.cache = RewardCache()
        self._workers = WorkerScorer(config, log)
        self._code = CodeScorer(max(config.workers, 1))
        self._functions = FunctionScorer(log)
        self._judge = JudgeScorer()
        self.remote = None if config.workers else RemoteScorer()
        """Scorers of other machines; None when this machine scores."""
        self._ending = contextlib.AsyncExitStack()
        self._counts = dict.fromkeys(RewardStatus, 0)
        self._total_s: deque[float] = deque(maxlen=WINDOW)

    async def __aenter__(self) -> Self:
        """Starts the worker processes. Raises `ChildDied`."""
        if self.remote is None:
            await self._ending.enter_async_context(self._workers)
        for part in (self._functions, self._code):
            self._ending.push_async_callback(part.aclose)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends the service's processes and connections."""
        await self._ending.aclose()

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order. Raises `ChildDied` when no worker can be started any more."""
        try:
            return await self.score_by(task_spec(task), task, answers)
        except TaskError as error:
            return self._count([failed(error)] * len(answers))

    async def score_by(self, spec: Spec, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order, by the given checker in place of the task's."""
        began_s = asyncio.get_running_loop().time()
        rewards = await self._score_parts(spec, task, answers)
        self._total_s.append(asyncio.get_running_loop().time() - began_s)
        return self._count(rewards)

    def _count(self, rewards: list[Reward]) -> list[Reward]:
        for reward in rewards:
            self._counts[reward.status] += 1
        return rewards

    @property
    def values(self) -> Mapping[str, float]:
        """Metrics: counts since the start, and percentiles in seconds over the latest groups."""
        asked = self.cache.hits + self.cache.misses
        return {
            "scorer_timed_out": self._counts[RewardStatus.TIMED_OUT],
            "scorer_failed": self._counts[RewardStatus.FAILED],
            "scorer_cached_share": self.cache.hits / asked if asked else 0.0,
            **percentiles("scorer", self._total_s),
            "scorer_sandboxes": self._code.sandboxes,
            **(self._workers.values if self.remote is None else {}),
        }

    @property
    def pids(self) -> list[int]:
        """Process ids of the worker processes."""
        return self._workers.pids

    async def _score_parts(self, spec: Spec, task: Task, answers: Sequence[str]) -> list[Reward]:
        if isinstance(spec, checker.Weighted):
            parts = await asyncio.gather(*(self._score_parts(part.scorer, task, answers) for part in spec.parts))
            return [weighted(spec, [rewards[i] for rewards in parts]) for i in range(len(answers))]
        said = [judged_part(spec, task.answer, text) if len(text) <= MOST_ANSWER_BYTES else None for text in answers]
        scored = iter(await self._score_cached(spec, task, [one for one in said if one is not None]))
        return [_unjudged(text) if one is None else next(scored) for text, one in zip(answers, said, strict=True)]

    async def _score_cached(self, spec: Spec, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order; equal answers are scored once."""
        if not answers or not is_cacheable(spec):
            return await self._scorer_of(spec).score_by(spec, task, answers) if answers else []
        task_key = key_of(spec, task)
        keys = [answer_key(task_key, answer) for answer in answers]
        known = {key: reward for key in dict.fromkeys(keys) if (reward := self.cache.get(key)) is not None}
        new = {key: answer for key, answer in zip(keys, answers, strict=True) if key not in known}
        if new:
            scored = await self._scorer_of(spec).score_by(spec, task, list(new.values()))
            for key, reward in zip(new, scored, strict=True):
                known[key] = reward
                self.cache.put(key, reward)
        return [known[key] for key in keys]

    def _scorer_of(self, spec: Spec) -> SpecScorer:
        """The scorer that runs a checker."""
        if isinstance(spec, checker.LLMJudge):
            return self._judge
        if isinstance(spec, checker.Function):
            return self._functions
        if self.remote is not None:
            return self.remote
        if isinstance(spec, checker.Code):
            return self._code
        return self._workers


def judged_part(spec: Spec, truth: str | None, text: str) -> str | None:
    r"""The part of a completion that a checker judges; None when a thought was cut off before any answer.

    Marks that the truth or the pattern contains are kept.

    >>> judged_part(checker.Exact(), "5", "<think>2 + 3</think><answer>\\boxed{5}</answer>")
    '5'
    """
    if isinstance(spec, WHOLE):
        return text
    named = (spec.pattern if isinstance(spec, checker.Regex) else "") or truth or ""
    if any(mark in named for mark in THINK):
        return text
    said = parted(text)
    if not said.complete:
        return None
    answer = said.answer
    if "<answer>" not in named and not isinstance(spec, checker.LLMJudge) and (inside := tagged(answer)) is not None:
        answer = inside
    if "\\boxed" not in named and isinstance(spec, UNBOXED) and (inside := boxed(answer)) is not None:
        answer = inside
    return answer


def _unjudged(text: str) -> Reward:
    """The reward of a completion that no checker sees."""
    large = len(text) > MOST_ANSWER_BYTES
    return Reward(0.0, evidence=f"longer than {MOST_ANSWER_BYTES} characters" if large else "a thought without an end")


def weighted(spec: checker.Weighted, rewards: Sequence[Reward]) -> Reward:
    """The weighted sum of the parts' values; a part without a score leaves the sum without a score.

    >>> spec = checker.Weighted((checker.Part(checker.Exact()), checker.Part(checker.Number(), weight=0.5)))
    >>> weighted(spec, [Reward(0.0), Reward(1.0)])
    Reward(value=0.5, status=<RewardStatus.SCORED: 'scored'>, parts=(('exact', 0.0), ('number', 1.0)), evidence='')
    """
    labels = [part.label or str(part.scorer.__struct_config__.tag) for part in spec.parts]
    for label, reward in zip(labels, rewards, strict=True):
        if reward.status is not RewardStatus.SCORED:
            return Reward(0.0, reward.status, evidence=f"{label}: {reward.evidence}")
    value = sum(part.weight * reward.value for part, reward in zip(spec.parts, rewards, strict=True))
    parts: list[tuple[str, float]] = []
    for label, reward in zip(labels, rewards, strict=True):
        parts += [(label, reward.value), *((f"{label}/{name}", number) for name, number in reward.parts)]
    said = (f"{label}: {reward.evidence}" for label, reward in zip(labels, rewards, strict=True) if reward.evidence)
    return Reward(value, RewardStatus.SCORED, tuple(parts), "; ".join(said)[:1000])


FULL = 1.0 - 1e-9


ONLY_FULL = "score, of which only 1 counts"
"""Name of the part with the score before a `BinaryScorer` made it 0 or 1."""


@dataclass(frozen=True, slots=True)
class BinaryScorer:
    """Wraps a scorer: a full score of some services' tasks gives 1, any other score gives 0.

    Many reasoning-gym scorers give a little for any answer, or for an answer in the right form. When the answers of a
    group differ in nothing else, training would learn only that. The score itself stays in `Reward.parts`.
    """

    scorer: Scorer
    services: Collection[str]

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order."""
        rewards = await self.scorer.score(task, answers)
        return [_binary(reward) for reward in rewards] if task.service in self.services else rewards


def _binary(reward: Reward) -> Reward:
    if reward.status is not RewardStatus.SCORED:
        return reward
    return replace(reward, value=float(reward.value >= FULL), parts=(*reward.parts, (ONLY_FULL, reward.value)))
