"""Which answers to which questions were taken before, whoever signed them. Pure; bounded.

An offer costs its author nothing to sign again, under any name. So what counts is what is in it: an answer that was
taken once is none the next time, and an author is praised once for a question.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from shoal.types import Group, Task

MOST = 1 << 17
"""Answers, and praises, that are remembered; those that were said longest ago are forgotten."""


class Contents:
    """Remembers digests: of question and answer, and of question and author."""

    def __init__(self, trained: Iterable[Group] = ()) -> None:
        """`trained` are external groups of this run's earlier life, the oldest first."""
        self._said: OrderedDict[bytes, None] = OrderedDict()
        self._praised: OrderedDict[bytes, None] = OrderedDict()
        for group in trained:
            self.remember(group.task, [rollout.messages[-1].content for rollout in group.rollouts])

    def fresh(self, task: Task, texts: Sequence[str]) -> list[int]:
        """Positions of the texts that nobody said before in answer to this; space and case make no difference."""
        return [i for i, text in enumerate(texts) if _digest(task, _plain(text)) not in self._said]

    def remember(self, task: Task, texts: Sequence[str]) -> None:
        """Keeps answers that were taken."""
        for text in texts:
            _put(self._said, _digest(task, _plain(text)))

    def praises(self, task: Task, peer_id: str) -> bool:
        """Whether an author is to be praised for this question: the first time."""
        return _put(self._praised, _digest(task, peer_id))


def _put(table: OrderedDict[bytes, None], key: bytes) -> bool:
    """Whether a key is new; now it is the newest."""
    new = key not in table
    table[key] = None
    table.move_to_end(key)
    if len(table) > MOST:
        table.popitem(last=False)
    return new


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _digest(task: Task, text: str) -> bytes:
    asked = "\x1f".join(message.content for message in task.messages)
    return hashlib.blake2b(f"{asked}\x1e{text}".encode(errors="surrogatepass"), digest_size=16).digest()
