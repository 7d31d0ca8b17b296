"""Digests of answers detect repeats, under any peer's signature or of this node's answers. Pure; bounded.

A new signature costs a peer nothing, so offers are compared by content. Long texts that are equal are copies: an offer
counts if it has a new long text. Honest peers with one seed give the same short texts, as often as
they are likely; an offer of short texts counts unless all of them were in one earlier offer. An earlier offer with one
more text is a copy too.

A question counts a few times in a while, once per author, and earns its author praise once. This node's own answers
are never accepted from peers.
"""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from shoal.swarm.trust.rates import Recent
from shoal.swarm.wire.offer import offered
from shoal.types import Group, Task

MOST = 1 << 17
"""Entries of each table; the oldest are forgotten."""
MOST_OFFERS = 16
"""Offers of one question that are compared as a whole."""
MOST_PER_QUESTION = 4
"""Offers of one question taken in a while, from all peers together."""
LONG = 32
"""Characters of a text that two authors do not write alike by chance."""


class Contents:
    """Digests of answers, by question and by author."""

    def __init__(self) -> None:
        self._long: Recent[bytes, None] = Recent(MOST)
        self._own: Recent[bytes, None] = Recent(MOST)  # long texts of this node
        self._offers: Recent[bytes, list[Counter[bytes]]] = Recent(MOST)
        self._asked: Recent[bytes, float] = Recent(MOST)  # when, of a clock that is never set
        self._times: Recent[bytes, list[float]] = Recent(MOST)

    def remember(self, group: Group) -> None:
        """Remembers a group of this run: an own one, which peers may send back, or one of a peer that was trained."""
        plain = [_plain(text) for text in texts_of(group)]
        self._remember(group.task, plain)
        if not group.external:
            self._own.update((_digest(group.task, text), None) for text in plain if len(text) >= LONG)

    def repeats(self, task: Task, texts: Sequence[str], peer_id: str, since_s: float) -> bool:
        """Tells whether an offer was given before, or its question was taken after `since_s`, too often or of the
        author.

        Letter case, compatible forms, look-alikes, accents, space and invisible characters make no difference.
        """
        if self._asked.get(_digest(task, peer_id), since_s) > since_s:
            return True
        question = _digest(task, "")
        if sum(at_s > since_s for at_s in self._times.get(question, [])) >= MOST_PER_QUESTION:
            return True
        found = [(_digest(task, plain), len(plain) >= LONG) for plain in map(_plain, texts)]
        others = [digest for digest, long in found if not (long and digest in self._own)]
        if len(others) < min(2, len(found)):
            return True
        long_ones = [digest for digest, long in found if long]
        if long_ones and all(digest in self._long for digest in long_ones):
            return True
        offered = Counter(others)
        return any(
            (not long_ones and offered <= earlier) or (offered >= earlier and offered.total() - earlier.total() < 2)
            for earlier in self._offers.get(question, [])
        )

    def take(self, task: Task, texts: Sequence[str], peer_id: str, now_s: float) -> bool:
        """Stores the digests of an offer; returns True for the author's first offer of this question."""
        self._remember(task, [_plain(text) for text in texts])
        question, asked = _digest(task, ""), _digest(task, peer_id)
        self._times[question] = [*self._times.get(question, []), now_s][-MOST_PER_QUESTION:]
        new = asked not in self._asked
        self._asked[asked] = now_s
        return new

    def _remember(self, task: Task, plain: Sequence[str]) -> None:
        self._long.update((_digest(task, text), None) for text in plain if len(text) >= LONG)
        question = _digest(task, "")
        offer = Counter(_digest(task, text) for text in plain)
        self._offers[question] = [*self._offers.get(question, []), offer][-MOST_OFFERS:]


def texts_of(group: Group) -> list[str]:
    """All that was sampled in each rollout."""
    return [offered(rollout, len(group.task.messages)).said for rollout in group.rollouts]


def _plain(text: str) -> str:
    """Text without what the eye does not see: Unicode's compatible forms, case, accents, invisible characters and
    letters of other scripts that look alike (Unicode TR39).

    >>> _plain("Ｓｉｘ\\u200b  caf\\u00e9 \\u0430nd m\\u043ere")
    'six cafe and more'
    """
    seen = unicodedata.normalize("NFKD", text).casefold()
    if not seen.isascii():
        from disarm import normalize_confusables  # a run without a swarm does not load it

        seen = "".join(filter(_is_seen, seen))
        seen = normalize_confusables(seen).casefold()
    return " ".join(seen.split())


@lru_cache(1 << 16)
def _is_seen(character: str) -> bool:
    return unicodedata.category(character) not in ("Cf", "Cc", "Cs", "Mn", "Me") or character.isspace()


def _digest(task: Task, text: str) -> bytes:
    asked = "\x1f".join(message.content for message in task.messages)
    return hashlib.blake2b(f"{asked}\x1e{text}".encode(errors="surrogatepass"), digest_size=16).digest()
