"""Peers as teachers: a node scores under its own model what others sampled, and learns from whoever scores it best.

With `swarm.teach` a node does two things more:

    teach   It computes the logprobs of peers' answers in tasks where its own mean reward is higher than theirs, and
            sends them: for each answer, the bytes at which its tokens end and the logprob of each token.
    learn   It keeps what it shared. When scores of it come, it trains the group once more: on-policy distillation
            (reverse KL, as with `train.teacher`), with the teacher's logprobs in place of rewards.

Teacher and learner need no common tokenizer. Both cut the text into tokens, and a span reaches from one end of a token
that both have to the next. Each of the learner's tokens in a span is reinforced with the teacher's logprob of the span
less its own, since a span is what both can be asked about: log p(span) is the sum over its tokens.

Nobody is believed: a teacher counts in tasks where its offers, scored here, were better than this node's own groups.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from shoal.errors import ConfigError
from shoal.interfaces import Renderer
from shoal.model.answer import written
from shoal.model.chat_template import ChatRenderer
from shoal.model.spans import MOST_NATS, TokenBytes, bounded, span_advantages, token_ends
from shoal.swarm.encoding import Encoded, EncodedRollout, rollouts_of
from shoal.swarm.offer import Course, OfferedRollout, ScoredAnswer, Scores
from shoal.swarm.trust import Reason, Recent, VerifiedMessage
from shoal.types import Completion, External, FinishReason, Group, Origin, Reward, Role

MOST_SHARED = 256
"""Own groups that may still be scored by a teacher."""
MOST_MEASURED = 1 << 14
"""Pairs of peer and task with a measured skill."""
MEASURED = 3
"""Offers of a peer in a task before its skill there counts."""
DECAY = 0.9
"""Weight of earlier offers in a measured skill."""
TOLD = 0.5
"""Least share of a lesson's tokens on which the teacher says more than that it forbids them."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """An own group with a teacher's scores of its answers."""

    group: Group
    source: Encoded
    rewards: tuple[Reward, ...]
    scores: tuple[ScoredAnswer, ...]
    """One per kept answer of the source, as the rewards are."""
    teacher: str
    message_id: str
    skill: float
    """Measured skill of the teacher."""

    def trained(
        self, logprobs: Iterator[Sequence[float]], version: int, external: External, token_bytes: TokenBytes
    ) -> Group:
        """The group as it is trained: sampled by this node under its present weights, with advantages per token."""
        sampled = rollouts_of(self.source, self.rewards, logprobs, version, external)
        told = [
            _told(scored, rollout.turns[0].completion, token_bytes, written(rollout.messages[-1]))
            for rollout, scored in zip(sampled, self.scores, strict=True)
        ]
        mean = fmean(advantage for answer in told for advantage in answer)
        rollouts = tuple(
            replace(rollout, external=replace(external, advantages=tuple(bounded(one - mean) for one in answer)))
            for rollout, answer in zip(sampled, told, strict=True)
        )
        id_ = f"{self.message_id}/lesson"
        return Group(id_, self.group.task, rollouts, version, Origin(self.teacher, self.message_id))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A peer's offer that this node may score."""

    author: str
    question: str
    source: Encoded


class Teaching:
    """Teaching of one node: offers that it will score, and scores of its own groups. Bounded; no I/O."""

    def __init__(self, peer_id: str, token_bytes: TokenBytes, most: int) -> None:
        """Up to `most` offers are scored per step; older ones are forgotten."""
        self._peer_id, self._token_bytes = peer_id, token_bytes
        self._shared: Recent[bytes, Group] = Recent(MOST_SHARED)
        self._lessons: Recent[bytes, Lesson] = Recent(MOST_SHARED)
        self._skills: Recent[tuple[str, str], tuple[int, float]] = Recent(MOST_MEASURED)
        self._asked: deque[_Asked] = deque(maxlen=most)

    def share(self, question: str, group: Group) -> None:
        """Remembers an own group that was shared under a question."""
        self._shared[_key(self._peer_id, question)] = group

    def measure(
        self, author: str, question: str, source: Encoded, rewards: Sequence[Reward], own: float | None
    ) -> None:
        """Records a peer's offer as scored here; `own` is this node's mean reward in such tasks, None before any."""
        mean, at = fmean(reward.value for reward in rewards), (author, source.task.service)
        count, before = self._skills.get(at, (0, mean))
        self._skills[at] = count + 1, DECAY * before + (1 - DECAY) * mean
        if own is not None and mean < own and all(len(one.turns) == 1 for one in source.kept):
            self._asked.append(_Asked(author, question, source))

    def skill(self, peer_id: str, service: str) -> float | None:
        """Mean reward of a peer's offers in a service's tasks, as scored here; None before `MEASURED` of them."""
        count, mean = self._skills.get((peer_id, service), (0, 0.0))
        return mean if count >= MEASURED else None

    def asked(self) -> list[_Asked]:
        """Takes the offers that are to be scored."""
        found = list(self._asked)
        self._asked.clear()
        return found

    def scores(self, asked: _Asked, logprobs: Iterator[Sequence[float]]) -> Scores | None:
        """This model's scores of an offer; `logprobs` has those of its rows, in nats. None when no answer is spelt."""
        answers = list[ScoredAnswer]()
        for one in asked.source.kept:
            (turn,), row = one.turns, next(logprobs)
            text, own = one.offered.text, row[len(turn.rendered_ids) - 1 :]
            ends = _spelled(turn.completion, self._token_bytes, text)
            if ends is not None:
                answers.append(ScoredAnswer(_digest(text), ends, tuple(min(0.0, round(value, 4)) for value in own)))
        return Scores(_key(asked.author, asked.question), tuple(answers)) if answers else None

    def trained(self, lesson: Lesson, logprobs: Iterator[Sequence[float]], version: int, external: External) -> Group:
        """A lesson as it is trained; `logprobs` has those of its rows under this node's weights, in nats."""
        return lesson.trained(logprobs, version, external, self._token_bytes)

    def hear(self, message: VerifiedMessage, scores: Scores, own: Callable[[str], float | None]) -> Reason | None:
        """Keeps scores of an own group if their author is the best teacher for it; else the reason why not.

        `own` gives this node's mean reward in a service's tasks.
        """
        group = self._shared.get(scores.key)
        if group is None:
            return None  # somebody else's
        service = group.task.service
        skill, mean = self.skill(message.peer_id, service), own(service)
        if skill is None or mean is None or skill <= mean:
            return Reason.NO_BETTER
        known = self._lessons.get(scores.key)
        if known is not None and known.skill >= skill:
            return Reason.NO_BETTER
        found = self._matched(group, {one.answer: one for one in scores.answers})
        if not found:
            return Reason.UNREADABLE
        told = [
            advantage
            for one, _, scored in found
            for advantage in _told(scored, one.turns[0].completion, self._token_bytes, one.offered.text)
        ]
        if fmean(advantage > -MOST_NATS for advantage in told) < TOLD:
            return Reason.FORBIDDEN
        kept, rewards, matched = zip(*found, strict=True)
        source = Encoded(group.task, kept)
        self._lessons[scores.key] = Lesson(group, source, rewards, matched, message.peer_id, message.id, skill)
        return None

    @property
    def ready(self) -> int:
        """Number of lessons that a step may take."""
        return len(self._lessons)

    def take(self, most: int, banned: set[str]) -> list[Lesson]:
        """Takes lessons, newest first; the group of a lesson is not taught again."""
        taken = list[Lesson]()
        while self._lessons and len(taken) < most:
            key, lesson = self._lessons.popitem()
            if lesson.teacher not in banned:
                del self._shared[key]
                taken.append(lesson)
        return taken

    def _matched(
        self, group: Group, scored: dict[bytes, ScoredAnswer]
    ) -> list[tuple[EncodedRollout, Reward, ScoredAnswer]]:
        """The answers of a group, of one turn each, that scores speak of to their end."""
        found, prompt = list[tuple[EncodedRollout, Reward, ScoredAnswer]](), len(group.task.messages)
        for rollout in group.finished:
            said = rollout.messages[prompt:]
            if len(rollout.turns) != 1 or len(said) != 1 or said[0].role is not Role.ASSISTANT:
                continue
            text, completion = written(said[0]), rollout.turns[0].completion
            one, ends = scored.get(_digest(text)), _spelled(completion, self._token_bytes, text)
            if one is not None and ends is not None and _speaks(one, ends, _stops(completion)):
                offered = OfferedRollout(text, bool(_stops(completion)))
                found.append((EncodedRollout(offered, Course(), said, rollout.turns), rollout.reward, one))
        return found


def teaching_of(peer_id: str, renderer: Renderer, most: int) -> Teaching:
    """Makes the teaching of a node with this tokenizer. Raises `ConfigError`."""
    if not isinstance(renderer, ChatRenderer) or not most:
        raise ConfigError("swarm.teach: expected swarm.external_groups above 0 and a tokenizer of text")
    return Teaching(peer_id, renderer.token_bytes, most)


def _speaks(scored: ScoredAnswer, ends: Sequence[int], stops: int) -> bool:
    """Whether scores rise to the end of the same text, with a logprob for each token and the stop."""
    rises = all(before < after for before, after in pairwise((0, *scored.ends)))
    return rises and scored.ends[-1:] == tuple(ends[-1:]) and len(scored.logprobs) == len(scored.ends) + stops


def _stops(completion: Completion) -> int:
    """Stop tokens at the end of an answer: one unless it ran out of room."""
    return int(completion.finish_reason is FinishReason.STOP)


def _told(scored: ScoredAnswer, completion: Completion, token_bytes: TokenBytes, text: str) -> tuple[float, ...]:
    """Advantage of each token of an answer by its teacher's scores, within `MOST_NATS`."""
    ends = _spelled(completion, token_bytes, text)
    assert ends is not None, "a lesson is made of answers that their tokens spell"
    return span_advantages(ends, completion.logprobs, scored.ends, scored.logprobs)


def _spelled(completion: Completion, token_bytes: TokenBytes, text: str) -> tuple[int, ...] | None:
    """Ends of an answer's tokens in its text, the stop token apart; None where they do not spell it."""
    return token_ends(completion.token_ids[: len(completion.token_ids) - _stops(completion)], token_bytes, text)


def _key(author: str, question: str) -> bytes:
    return _digest(f"{author}\x1e{question}")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
