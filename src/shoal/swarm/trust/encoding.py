"""Offers as text: own groups become offers, and peers' offers become groups under the own tokenizer and scorers.

Checks run in order of cost: the question is drawn again, conversations are played again, the text is encoded, the
answers are scored. An answer that hangs costs one deadline and ends the reading. Checkers that cannot hang get the
whole group at once: eight answers one by one take twenty times as long.

The prompt is the node's own, and so is every request of a conversation: `Course` has them. A sampled text is kept only
if its token ids decode to the same text. Names of special tokens and characters unknown to the tokenizer would
otherwise be trained as tokens that no model sampled.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from shoal.checker import is_prompt, task_spec
from shoal.config import Config
from shoal.errors import SessionError, TaskError
from shoal.gateway.conversation import Conversation
from shoal.gateway.token_tree import Cause, TokenTree
from shoal.interfaces import Renderer, Scorer
from shoal.model.chat_template import ChatRenderer
from shoal.swarm.trust.ingress import Recogniser, VerifiedMessage
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.offer import Course, Offer, OfferedRollout
from shoal.turn_tree import prompt_ids, turns_of_rows
from shoal.types import Completion, FinishReason, Message, Reward, RewardStatus, Role, Rollout, Task, Turn


@dataclass(frozen=True, slots=True)
class EncodedRollout:
    """One rollout that this node can read. Its turns have no logprobs and no Versions yet."""

    offered: OfferedRollout
    course: Course
    messages: tuple[Message, ...]
    """Messages after the question's."""
    turns: tuple[Turn, ...]

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """Token ids of each row, in the order of the trainer's rows."""
        turns = self.turns
        return [
            prompt_ids(turns, indices[-1]) + turns[indices[-1]].completion.token_ids for indices in turns_of_rows(turns)
        ]

    def sampled_under(self, version: int, logprobs: Sequence[Sequence[float]]) -> tuple[Turn, ...]:
        """The turns as if this node had sampled them; `logprobs` are of each row's tokens but the first, in nats."""
        turns = list(self.turns)
        for indices, row in zip(turns_of_rows(self.turns), logprobs, strict=True):
            for index in indices:
                ids = self.turns[index].completion.token_ids
                start = len(prompt_ids(self.turns, index)) - 1
                own = tuple(min(0.0, value) for value in row[start : start + len(ids)])
                reason = self.turns[index].completion.finish_reason
                turns[index] = replace(turns[index], completion=Completion(ids, own, (version,) * len(ids), reason))
        return tuple(turns)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rollouts of an offer that this node can read."""

    task: Task
    kept: tuple[EncodedRollout, ...]

    @property
    def answers(self) -> list[str]:
        """All that was sampled in each kept rollout."""
        return [rollout.offered.said for rollout in self.kept]

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """Token ids of all rows."""
        return [row for rollout in self.kept for row in rollout.rows]


@dataclass(slots=True)
class ReadyOffer:
    """A verified offer with this node's rewards."""

    message: VerifiedMessage
    source: Encoded
    rewards: tuple[Reward, ...]
    uses: int = 0


def encode_offer(
    rollouts: Sequence[tuple[OfferedRollout, Course]],
    task: Task,
    renderer: Renderer,
    max_model_len: int,
    max_tokens: int,
) -> tuple[Encoded, Counter[Reason]]:
    """Encodes rollouts as answers to the node's own `task`; counts the others by the reason of refusal.

    A row has `max_model_len` tokens at most, and each sampled text `max_tokens`, as the node's own have. A text ends
    with the stop token where there is room for one. Its author's word on its end is not believed.
    """
    refused: Counter[Reason] = Counter()
    kept, completion = [], partial(_completion, renderer=renderer, max_tokens=max_tokens)
    prompt = cache(lambda: tuple(renderer.prompt_ids(task.messages)))
    for rollout, course in rollouts:
        try:
            if rollout.turns:
                turns = _conversation(rollout, course, renderer, completion)
            else:
                found = completion(renderer.completion_ids(rollout.text, prompt()))
                turns = None if found is None else (Turn(prompt(), found),)
        except SessionError:
            turns = None
        if turns is None:
            refused[Reason.UNREADABLE] += 1
            continue
        said = tuple(turn.message for turn in rollout.turns) or (Message(Role.ASSISTANT, rollout.text),)
        encoded = EncodedRollout(rollout, course, said, turns)
        longest = max(len(turn.completion.token_ids) for turn in turns)
        if longest > max_tokens or max(map(len, encoded.rows)) > max_model_len:
            refused[Reason.TOO_LONG] += 1
        else:
            kept.append(encoded)
    return Encoded(task, tuple(kept)), refused


def _conversation(
    rollout: OfferedRollout,
    course: Course,
    renderer: Renderer,
    completed: Callable[[Sequence[int] | None], Completion | None],
) -> tuple[Turn, ...] | None:
    """The turns of a conversation, as a session would have them. Raises `SessionError`."""
    if not isinstance(renderer, ChatRenderer):
        return None
    tree = TokenTree()
    sampled = [turn for turn in rollout.turns if turn.sampled]
    for asked, turn in zip(course.asked, sampled, strict=True):
        attachment, rendered = tree.attach(Conversation(asked.messages, asked.tools)), None
        if attachment.cause is None:
            rendered = [] if attachment.continues else renderer.bridge_ids(attachment.tail, asked.tools)
            if rendered is None:
                attachment = tree.detached(attachment, Cause.NO_BRIDGE)
        if rendered is None:
            rendered = renderer.prompt_ids(asked.messages, asked.tools)
        call = tree.open(attachment, rendered)
        ids = renderer.message_ids(turn.message, asked.messages, asked.tools, call.prompt_ids)
        completion = completed(ids)
        if completion is None:
            return None
        tree.commit(call, completion, turn.message)
    rewards = (*course.turn_rewards, *[0.0] * len(sampled))
    return tuple(replace(turn, reward=own) for turn, own in zip(tree.turns(), rewards, strict=False))


def _completion(ids: Sequence[int] | None, *, renderer: Renderer, max_tokens: int) -> Completion | None:
    """Token ids of a sampled text, with the stop token where there is room for it; None for an unreadable text."""
    if ids is None:
        return None
    ends = len(ids) < max_tokens
    found = (*ids, *(renderer.stop_token_ids[:1] if ends else ()))
    reason = FinishReason.STOP if ends else FinishReason.LENGTH
    return Completion(found, (0.0,) * len(found), (0,) * len(found), reason)


def rollouts_of(
    source: Encoded, rewards: Sequence[Reward], logprobs: Iterator[Sequence[float]], version: int
) -> tuple[Rollout, ...]:
    """Builds rollouts of the kept answers as if this node had sampled them under `version`.

    `rewards` are the node's own, one per kept rollout. `logprobs` are the node's own too, one list per row of the
    source: nats at the rollout temperature, for every token of a row but the first. The behaviour policy is therefore
    the node at the time of encoding.
    """
    rollouts, task = list[Rollout](), source.task
    for encoded, reward in zip(source.kept, rewards, strict=True):
        turns = encoded.sampled_under(version, [next(logprobs) for _ in encoded.rows])
        messages, id_ = (*task.messages, *encoded.messages), f"{task.id}#{len(rollouts)}"
        rollouts.append(Rollout(id_, messages, turns, reward))
    return tuple(rollouts)


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
