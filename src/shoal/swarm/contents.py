"""Which answers to which questions were taken before, whoever signed them. Pure; bounded.

An offer costs its author nothing to sign again, under any name. So what counts is what is in it: one is taken if it
has an answer that nobody gave before, and a question is taken of the same author once in a while, and praised once.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from shoal.model.answer import written
from shoal.types import Group, Task

MOST = 1 << 17
"""Answers that are remembered, and authors' questions; those of the longest ago are forgotten."""


class Contents:
    """Remembers digests: of questions with answers, and of questions with authors."""

    def __init__(self, trained: Iterable[Group] = ()) -> None:
        """`trained` are external groups of this run's earlier life, the oldest first."""
        self._answers: OrderedDict[bytes, float] = OrderedDict()
        self._asked: OrderedDict[bytes, float] = OrderedDict()  # when, of a clock that is never set
        for group in trained:
            self._remember(group.task, [written(rollout.messages[-1]) for rollout in group.rollouts])

    def repeats(self, task: Task, texts: Sequence[str], peer_id: str, since_s: float) -> bool:
        """Whether all texts were given before, or this was taken of the same author since then.

        Space and case make no difference.
        """
        if self._asked.get(_digest(task, peer_id), since_s) > since_s:
            return True
        return all(_digest(task, _plain(text)) in self._answers for text in texts)

    def take(self, task: Task, texts: Sequence[str], peer_id: str, now_s: float) -> bool:
        """Remembers what is taken; gives whether it is the first time of this author with this question."""
        self._remember(task, texts)
        return _put(self._asked, _digest(task, peer_id), now_s)

    def _remember(self, task: Task, texts: Sequence[str]) -> None:
        for text in texts:
            _put(self._answers, _digest(task, _plain(text)), 0.0)


def _put(table: OrderedDict[bytes, float], key: bytes, value: float) -> bool:
    """Whether a key is new; now it is the newest."""
    new = key not in table
    table[key] = value
    table.move_to_end(key)
    if len(table) > MOST:
        table.popitem(last=False)
    return new


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _digest(task: Task, text: str) -> bytes:
    asked = "\x1f".join(message.content for message in task.messages)
    return hashlib.blake2b(f"{asked}\x1e{text}".encode(errors="surrogatepass"), digest_size=16).digest()
