"""Packing of rows into micro-batches under a token budget. Pure.

A micro-batch is the input of one forward and backward. The split changes memory and speed, never the gradient.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from shoal.types import Sample

T = TypeVar("T")


def first_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of items, in bins of total size at most `budget`: first-fit-decreasing.

    An item larger than the budget is alone in its bin. Within a bin, sizes decrease.

    >>> first_fit([3, 9, 5, 2, 4], budget=10)
    [[1], [2, 4], [0, 3]]
    """
    if budget < 1:
        raise ValueError(f"budget: expected at least 1, got {budget}")
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        fit = next((b for b, free in enumerate(room) if size <= free), None)
        if fit is None:
            bins.append([index])
            room.append(budget - size)
        else:
            bins[fit].append(index)
            room[fit] -= size
    return bins


def even_bins(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Indices of items, in `count` bins of about equal size: from large to small, each goes into the emptiest bin.

    >>> even_bins([3, 9, 5, 2, 4], 2)
    [[1, 0], [2, 4, 3]]
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        emptiest = filled.index(min(filled))
        bins[emptiest].append(index)
        filled[emptiest] += sizes[index]
    return bins


def micro_batches(rows: Sequence[Sample], budget_tokens: int, ranks: int = 1) -> list[list[int]]:
    """Indices of rows, in micro-batches of at most `budget_tokens` tokens; every row is in exactly one.

    Rows with equal prompts stay together where the budget allows, because their prompt is computed, and counted, once.
    A row longer than the budget is alone in its micro-batch. With several ranks the micro-batches are of about equal
    size, and their number is a multiple of the ranks; some may be empty.
    """
    # Ranks must not wait for a rank that has a whole family, so families are cut where that evens the shares.
    share = min(budget_tokens, max(1, sum(len(row.tokens) for row in rows) // ranks))
    families = [
        part for family in _families(rows) for part in _parts(rows, family, share if ranks > 1 else budget_tokens)
    ]
    sizes = [_tokens(rows, family) for family in families]
    bins = first_fit(sizes, budget_tokens)
    if ranks > 1:
        count = -(-len(bins) // ranks) * ranks
        bins = even_bins(sizes, count)
        while any(len(bin_) > 1 and sum(sizes[i] for i in bin_) > budget_tokens for bin_ in bins):
            count += ranks
            bins = even_bins(sizes, count)
    return [[row for family in bin_ for row in families[family]] for bin_ in bins]


def even_slices(count: int, parts: int) -> list[range]:
    """Consecutive slices of `count` items, in `parts` parts whose sizes differ by at most one.

    >>> even_slices(5, 2)
    [range(0, 2), range(2, 5)]
    """
    return [range(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def mixed(things: Sequence[T], is_other: Callable[[T], bool], parts: int) -> list[T]:
    """Items of two kinds, ordered so that `even_slices` have even shares of both.

    >>> "".join(mixed("abcdXYZ", str.isupper, 2))
    'abXcdYZ'
    """
    first, second = ([thing for thing in things if is_other(thing) is other] for other in (False, True))
    slices = zip(even_slices(len(first), parts), even_slices(len(second), parts), strict=True)
    return [thing for some, others in slices for thing in (*(first[i] for i in some), *(second[i] for i in others))]


def prompt_length(row: Sample) -> int:
    """Tokens before the first trained token; all tokens when none is trained.

    >>> prompt_length(Sample((5, 6, 7), (0, 0, 1), (0.0, 0.0, -1.0), (-1, -1, 0), (0.0, 0.0, 1.0)))
    2
    """
    return row.mask.index(1) if 1 in row.mask else len(row.tokens)


def _families(rows: Sequence[Sample]) -> list[list[int]]:
    """Rows by prompt, in order of first appearance; long rows first within a family."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        by_prompt.setdefault(row.tokens[: prompt_length(row)], []).append(index)
    return [sorted(family, key=lambda i: -len(rows[i].tokens)) for family in by_prompt.values()]


def _tokens(rows: Sequence[Sample], family: Sequence[int]) -> int:
    """Tokens of a family's rows, with their common prompt counted once."""
    prompt = prompt_length(rows[family[0]])
    return prompt + sum(len(rows[i].tokens) - prompt for i in family)


def _parts(rows: Sequence[Sample], family: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Parts of the family, cut wherever it would exceed the budget."""
    prompt = prompt_length(rows[family[0]])
    parts: list[list[int]] = []
    size = 0
    for index in family:
        answer = len(rows[index].tokens) - prompt
        if not parts or size + answer > budget_tokens:
            parts.append([])
            size = prompt
        parts[-1].append(index)
        size += answer
    return parts


def tokens_per_microbatch(*, on_gpu: bool) -> int:
    """Default packing budget in tokens: on a GPU it fills the GPU, on a CPU it stays near the caches."""
    return 16384 if on_gpu else 1024
