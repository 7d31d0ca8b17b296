"""Digests of answers tell which were taken before, under any peer's signature. Pure; bounded.

A new signature costs a peer nothing, so offers are compared by content. An offer counts if it has an answer that nobody
gave before. A question counts once in a while per author, and earns praise once.
"""

import hashlib
from collections.abc import Iterable, Sequence

from shoal.model.answer import written
from shoal.swarm.rates import Recent
from shoal.types import Group, Message, Role, Task

MOST = 1 << 17
"""Entries of each table; the oldest are forgotten."""


class Contents:
    """Digests of questions with answers, and of questions with authors."""

    def __init__(self, trained: Iterable[Group] = ()) -> None:
        """`trained` lists external groups of this run's earlier process, oldest first."""
        self._answers: Recent[bytes, None] = Recent(MOST)
        self._asked: Recent[bytes, float] = Recent(MOST)  # when, of a clock that is never set
        for group in trained:
            prompt = len(group.task.messages)
            self._remember(group.task, [_said(rollout.messages[prompt:]) for rollout in group.rollouts])

    def repeats(self, task: Task, texts: Sequence[str], peer_id: str, since_s: float) -> bool:
        """Tells whether all texts were given before, or the author's question was taken after `since_s`.

        Space and case make no difference.
        """
        if self._asked.get(_digest(task, peer_id), since_s) > since_s:
            return True
        return all(_digest(task, _plain(text)) in self._answers for text in texts)

    def take(self, task: Task, texts: Sequence[str], peer_id: str, now_s: float) -> bool:
        """Stores the digests of an offer; returns True for the author's first offer of this question."""
        self._remember(task, texts)
        asked = _digest(task, peer_id)
        new = asked not in self._asked
        self._asked[asked] = now_s
        return new

    def _remember(self, task: Task, texts: Sequence[str]) -> None:
        for text in texts:
            self._answers[_digest(task, _plain(text))] = None


def _said(answers: Sequence[Message]) -> str:
    """All that was sampled, as `OfferedRollout.said` has it."""
    sampled = [one for one in answers if one.role is Role.ASSISTANT]
    calls = [call.name + call.arguments for one in sampled for call in one.tool_calls]
    return "\n".join([*map(written, sampled), *calls])


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _digest(task: Task, text: str) -> bytes:
    asked = "\x1f".join(message.content for message in task.messages)
    return hashlib.blake2b(f"{asked}\x1e{text}".encode(errors="surrogatepass"), digest_size=16).digest()
