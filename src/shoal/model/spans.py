"""One text under two tokenizers: a span reaches from one end of a token that both have to the next.

A span is the least that both models can be asked about: log p(span) is the sum over its tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

MOST_NATS = 5.0
"""Bound on a token's advantage, in nats either way, also for spans that a teacher forbids."""

TokenBytes = Callable[[int], bytes]


def token_ends(token_ids: Sequence[int], token_bytes: TokenBytes, text: str) -> tuple[int, ...] | None:
    """Bytes of the text at which its tokens end; None for tokens that do not spell it, each with at least a byte.

    >>> token_ends([0, 1], [b"ab", b"c"].__getitem__, "abc")
    (2, 3)
    """
    ends, spelt = [0], b"".join(map(token_bytes, token_ids))
    for token in token_ids:
        ends.append(ends[-1] + len(token_bytes(token)))
    rises = all(before < after for before, after in pairwise(ends))
    return tuple(ends[1:]) if rises and spelt == text.encode(errors="surrogatepass") else None


def common_spans(own_ends: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Own tokens and the other's of each span, in order.

    >>> list(common_spans((1, 2, 3), (2, 3)))
    [(slice(0, 2, None), slice(0, 1, None)), (slice(2, 3, None), slice(1, 2, None))]
    """
    i = j = 0
    for end in sorted(set(own_ends) & set(ends)):
        own_to, to = own_ends.index(end, i) + 1, ends.index(end, j) + 1
        yield slice(i, own_to), slice(j, to)
        i, j = own_to, to


def bounded(nats: float) -> float:
    """Advantage within `MOST_NATS`."""
    return min(max(nats, -MOST_NATS), MOST_NATS)
