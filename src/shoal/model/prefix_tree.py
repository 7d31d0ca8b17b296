"""Prefix tree of token rows, which keeps every common beginning once. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

END_LAST = 1 << 62
"""Number that sorts after every token id."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Row of a prefix tree: the nodes from the root to its end; the last ones belong to it."""

    nodes: tuple[int, ...]
    shared: int
    """Number of first nodes that an earlier path owns; the later nodes are numbered consecutively."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Token rows with every common beginning kept once.

    A causal model's output at a token depends only on the tokens before it. So a prompt that many rows share, or two
    equal answers, are computed once. A row's last token has no node, because it predicts nothing.
    """

    tokens: tuple[int, ...]  # [M]
    positions: tuple[int, ...]  # [M] depth
    paths: tuple[Branch, ...]
    """Paths of the rows with unshared nodes; every node belongs to exactly one path."""
    node_of: tuple[int, ...]  # [T] node of each token of the rows laid end to end; -1 for the last of each row


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens that two rows share at their beginning.

    >>> shared_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def prefix_tree(rows: Sequence[Sequence[int]]) -> PrefixTree:
    """Tree of the given token rows, in any order.

    >>> tree = prefix_tree([[5, 6, 7, 9], [5, 6, 8], [5, 6, 7, 9]])
    >>> tree.tokens, tree.positions, tree.node_of
    ((5, 6, 7), (0, 1, 2), (0, 1, 2, -1, 0, 1, -1, 0, 1, 2, -1))
    """
    tokens: list[int] = []
    positions: list[int] = []
    paths: list[Branch] = []
    nodes_of: list[tuple[int, ...]] = [()] * len(rows)
    before: Sequence[int] = ()
    nodes: tuple[int, ...] = ()
    # A row comes after the rows that begin with it, so that it adds nothing to them.
    for row in sorted(range(len(rows)), key=lambda i: [*rows[i][:-1], END_LAST]):
        inner = rows[row][:-1]
        shared = shared_length(inner, before)
        first = len(tokens)
        nodes = (*nodes[:shared], *range(first, first + len(inner) - shared))
        if len(inner) > shared:
            tokens.extend(inner[shared:])
            positions.extend(range(shared, len(inner)))
            paths.append(Branch(nodes, shared))
        nodes_of[row], before = nodes, inner
    return PrefixTree(
        tokens=tuple(tokens),
        positions=tuple(positions),
        paths=tuple(paths),
        node_of=tuple(node for nodes in nodes_of for node in (*nodes, -1)),
    )
