"""The tree of a rollout's turns: the prompt of each turn, and the rows that turns are trained in. Pure.

A turn holds the tokens after its parent's only, so that a conversation of n turns holds each token once, not n times.
"""

from collections.abc import Sequence
from itertools import chain

from shoal.types import Completion, Turn


def prompt_ids(turns: Sequence[Turn], index: int, after: int | None = None) -> tuple[int, ...]:
    """Tokens that the engine had in context for a turn, from the end of the ancestor `after` where one is given.

    >>> from shoal.types import Completion, FinishReason
    >>> sampled = Completion((5,), (-1.0,), (0,), FinishReason.STOP)
    >>> turns = (Turn((1, 2), sampled), Turn((3,), sampled, parent=0))
    >>> prompt_ids(turns, 1), prompt_ids(turns, 1, after=0)
    ((1, 2, 5, 3), (3,))
    """
    parts, at = [turns[index].rendered_ids], turns[index].parent
    while at is not None and at != after:
        parts += [turns[at].completion.token_ids, turns[at].rendered_ids]
        at = turns[at].parent
    return tuple(chain.from_iterable(reversed(parts)))


def turns_of_rows(turns: Sequence[Turn]) -> list[list[int]]:
    """Indices of the turns of each row: every turn that sampled a token is in exactly one row.

    A turn continues the row that ends in its parent, unless another turn already does; then it begins a new row.
    A turn that sampled nothing ends no row: its children go on from where it did.
    """
    rows: list[list[int]] = []
    ends: dict[int | None, list[int]] = {}
    for index, turn in enumerate(turns):
        if not turn.completion.token_ids:
            continue
        before = turn.parent
        while before is not None and not turns[before].completion.token_ids:
            before = turns[before].parent
        row = ends.pop(before, None)
        if row is None:
            row = []
            rows.append(row)
        row.append(index)
        ends[index] = row
    return rows


def trained(completion: Completion) -> list[bool]:
    """Whether each token is trained: all but the forced ones are."""
    forced = frozenset(completion.forced)
    return [index not in forced for index in range(len(completion.token_ids))]


def trained_rows(turns: Sequence[Turn]) -> list[list[int]]:
    """Indices of the turns of each row that the trainer gets: rows of forced tokens alone are left out."""
    return [row for row in turns_of_rows(turns) if any(any(trained(turns[index].completion)) for index in row)]
