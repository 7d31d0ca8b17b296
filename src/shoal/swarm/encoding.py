"""Encoding turns peers' text into rows of this node's tokenizer and into a trainable group. Pure.

The prompt is the node's own. An answer is kept only if its token ids decode to the same text. Names of special tokens
and characters unknown to the tokenizer would otherwise be trained as tokens that no model sampled.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import SessionError
from shoal.interfaces import Renderer
from shoal.swarm.offer import Offer, OfferedRollout
from shoal.swarm.trust import Reason, VerifiedMessage
from shoal.types import Completion, External, FinishReason, Message, Reward, Role, Rollout, Task, Turn


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rollouts of an offer that this node can read, as token ids."""

    task: Task
    prompt_ids: tuple[int, ...]
    kept: tuple[OfferedRollout, ...]
    answer_ids: tuple[tuple[int, ...], ...]
    """Token ids of each kept answer, with the stop token if the answer is complete."""

    @property
    def answers(self) -> list[str]:
        """Texts of the kept rollouts."""
        return [rollout.text for rollout in self.kept]

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
        return Encoded(task, (), (), ()), refused
    for rollout in offer.rollouts:
        found = renderer.completion_ids(rollout.text, prompt_ids)
        stop = renderer.stop_token_ids[:1] if rollout.complete else ()
        ids = () if found is None else (*found, *stop)
        if not ids:
            refused[Reason.UNREADABLE] += 1
        elif len(prompt_ids) + len(ids) > max_model_len:
            refused[Reason.TOO_LONG] += 1
        else:
            kept.append(rollout)
            answers.append(ids)
    return Encoded(task, prompt_ids, tuple(kept), tuple(answers)), refused


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
    rollouts, task = list[Rollout](), source.task
    for offered, ids, reward, row in zip(source.kept, source.answer_ids, rewards, logprobs, strict=True):
        own = tuple(min(0.0, value) for value in row[-len(ids) :])
        reason = FinishReason.STOP if offered.complete else FinishReason.LENGTH
        turn = Turn(source.prompt_ids, Completion(ids, own, (version,) * len(ids), reason))
        messages, id_ = (*task.messages, Message(Role.ASSISTANT, offered.text)), f"{task.id}#{len(rollouts)}"
        rollouts.append(Rollout(id_, messages, (turn,), reward, external=external))
    return tuple(rollouts)
