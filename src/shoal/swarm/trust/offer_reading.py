"""Reads a peer's offer as answers to an own task, and scores them.

Checks run in order of cost: the question is drawn again, conversations are played again, the text is encoded, the
answers are scored. An answer that hangs costs one deadline and ends the reading. Checkers that cannot hang get the
whole group at once: eight answers one by one take twenty times as long.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shoal.checker import is_prompt, task_spec
from shoal.config import Config
from shoal.errors import TaskError
from shoal.interfaces import Renderer, Scorer
from shoal.swarm.trust.encoding import Encoded, EncodedRollout, encode_offer
from shoal.swarm.trust.ingress import Recogniser
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.offer import Course, Offer, OfferedRollout
from shoal.types import Reward, RewardStatus, Task


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """Bounds on reading an offer: those of this node's own groups."""

    row_tokens: int
    """Tokens of the longest row."""
    answer_tokens: int
    """Tokens of the longest answer, or turn of a conversation."""
    answers: int
    """Most answers of an offer; a larger offer is sampled at random."""


def limits_of(config: Config, max_model_len: int) -> ReadingLimits:
    """Bounds by a node's own rollouts, so that an external group costs and weighs no more than an own one."""
    return ReadingLimits(max_model_len, config.rollout.max_tokens, max(config.rollout.group_size, 2))


@dataclass(frozen=True, slots=True)
class OfferReader:
    """Reads offers with a node's own tasks, tokenizer and scorer."""

    own: Recogniser
    scorer: Scorer
    renderer: Renderer
    limits: ReadingLimits
    rng: random.Random
    threads: bool = True
    """Whether long texts are encoded in a thread; False under a virtual clock, which cannot wait for threads."""

    async def read(self, content: Offer) -> tuple[Encoded, Counter[Reason]] | Reason:
        """The answers that this node can read, and the refusals of the others; or why there is no such task."""
        task = await self.own.task(content.claim)
        if isinstance(task, Reason):
            return task
        if len(content.rollouts) > self.limits.answers:
            content = replace(content, rollouts=tuple(self.rng.sample(content.rollouts, self.limits.answers)))
        courses = list[tuple[OfferedRollout, Course]]()
        for rollout in content.rollouts:
            course = await self.own.course(content.claim, task, rollout)
            if isinstance(course, Reason):
                return course
            courses.append((rollout, course))
        encode: Callable[[], tuple[Encoded, Counter[Reason]]]
        encode = partial(encode_offer, courses, task, self.renderer, self.limits.row_tokens, self.limits.answer_tokens)
        return await asyncio.to_thread(encode) if self.threads else encode()

    async def score(self, source: Encoded) -> tuple[Reward, ...] | Reason:
        """One reward for each answer, by this node's own scorer; or why the offer does not count."""
        at_once = _has_prompt_checker(source.task) and all(one.course.reward is None for one in source.kept)
        rewards = await self._scored(source.task, source.kept) if at_once else ()
        for one in source.kept[len(rewards) :]:
            rewards += (one.course.reward,) if one.course.reward else await self._scored(source.task, [one])
            if _fault(rewards[-1]) is not None:
                break
        return next((fault for fault in map(_fault, rewards) if fault is not None), rewards)

    async def _scored(self, task: Task, kept: Sequence[EncodedRollout]) -> tuple[Reward, ...]:
        answers = [one.offered.text if one.course.answer is None else one.course.answer for one in kept]
        return tuple(await self.scorer.score(task, answers))


def _has_prompt_checker(task: Task) -> bool:
    """Whether the task's checker takes bounded time for any answer; False for a task without a checker."""
    with contextlib.suppress(TaskError):
        return is_prompt(task_spec(task))
    return False


def _fault(reward: Reward) -> Reason | None:
    """Why an answer with such a reward ends its offer."""
    if reward.exhausted or reward.status is RewardStatus.TIMED_OUT:
        return Reason.HANGS
    return None if reward.status is RewardStatus.SCORED else Reason.UNSCORED
