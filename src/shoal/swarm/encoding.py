"""Encoding turns peers' text into rows of this node's tokenizer and into a trainable group. Pure.

The prompt is the node's own. An answer is kept only if its token ids decode to the same text. Names of special tokens
and characters unknown to the tokenizer would otherwise be trained as tokens that no model sampled.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import SessionError
from shoal.interfaces import Renderer
from shoal.swarm.offer import Offer
from shoal.swarm.trust import Reason, VerifiedMessage
from shoal.types import (
    Completion,
    External,
    FinishReason,
    Message,
    Reward,
    Role,
    Rollout,
    Task,
    Turn,
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rollouts of an offer that this node can read, as token ids."""

    task: Task
    offer: Offer
    prompt_ids: tuple[int, ...]
    kept: tuple[int, ...]
    """Indices of the kept rollouts within the offer."""
    answer_ids: tuple[tuple[int, ...], ...]
    """Token ids of each kept answer, with the stop token if the answer is complete."""

    @property
    def answers(self) -> list[str]:
        """Texts of the kept rollouts."""
        return [self.offer.rollouts[i].text for i in self.kept]

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """Token ids of prompt and answer, one row per kept rollout."""
        return [self.prompt_ids + ids for ids in self.answer_ids]


@dataclass(slots=True)
class ReadyOffer:
    """A verified offer with this node's rewards."""

    message: VerifiedMessage
    source: Encoded
    rewards: tuple[Reward, ...]
    uses: int = 0


def encode_offer(offer: Offer, task: Task, renderer: Renderer, max_model_len: int) -> tuple[Encoded, Counter[Reason]]:
    """Encodes an offer as answers to the node's own `task`; counts the other rollouts by the reason of refusal."""
    refused: Counter[Reason] = Counter()
    kept, answers = [], []
    try:
        prompt_ids = tuple(renderer.prompt_ids(task.messages))
    except SessionError:
        refused[Reason.UNREADABLE] += len(offer.rollouts)
        return Encoded(task, offer, (), (), ()), refused
    for i, rollout in enumerate(offer.rollouts):
        ids = renderer.completion_ids(rollout.text, prompt_ids)
        if ids is None:
            refused[Reason.UNREADABLE] += 1
            continue
        ids = [*ids, *renderer.stop_token_ids[:1]] if rollout.complete else ids
        if not ids or len(prompt_ids) + len(ids) > max_model_len:
            refused[Reason.TOO_LONG if ids else Reason.UNREADABLE] += 1
            continue
        kept.append(i)
        answers.append(tuple(ids))
    return Encoded(task, offer, prompt_ids, tuple(kept), tuple(answers)), refused


def rollouts_of(
    source: Encoded,
    rewards: Sequence[Reward],
    logprobs: Sequence[Sequence[float]],
    version: int,
    external: External,
) -> tuple[Rollout, ...]:
    """Builds rollouts of the kept answers as if this node had sampled them under `version`.

    `rewards` are the node's own, one per kept rollout. `logprobs` are the node's own too: nats at the rollout
    temperature, for every token of a row but the first. The behaviour policy is therefore the node at the time of
    encoding. The log keeps `external`.
    """
    rollouts = []
    for position, (i, ids, reward, row) in enumerate(
        zip(source.kept, source.answer_ids, rewards, logprobs, strict=True)
    ):
        offered = source.offer.rollouts[i]
        own = tuple(min(0.0, value) for value in row[-len(ids) :])
        reason = FinishReason.STOP if offered.complete else FinishReason.LENGTH
        completion = Completion(ids, own, (version,) * len(ids), reason)
        rollouts.append(
            Rollout(
                id=f"{source.task.id}#{position}",
                messages=(*source.task.messages, Message(Role.ASSISTANT, offered.text)),
                turns=(Turn(source.prompt_ids, completion),),
                reward=reward,
                external=external,
            )
        )
    return tuple(rollouts)
