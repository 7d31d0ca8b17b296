"""Rows into micro-batches under a token budget. Pure.

A micro-batch is what one forward and backward see; the split changes memory and speed, never the gradient.
"""

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], budget_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Indices of rows, in micro-batches of at most `budget_tokens` tokens: first-fit-decreasing.

    A row longer than the budget is alone in its micro-batch. Within one, rows go from long to short, so that rows of
    like length are neighbours. `at_least` asks for more micro-batches than needed, as ranks that must all take the
    same number do; empty ones are possible when there are fewer rows than that.

    >>> micro_batches([3, 9, 5, 2, 4], budget_tokens=10)
    [[1], [2, 4], [0, 3]]
    """
    if budget_tokens < 1:
        raise ValueError(f"budget_tokens: expected at least 1, got {budget_tokens}")
    bins: list[list[int]] = [[] for _ in range(at_least)]
    room = [budget_tokens] * at_least
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        fit = next((b for b, free in enumerate(room) if length <= free or not bins[b]), None)
        if fit is None:
            bins.append([index])
            room.append(budget_tokens - length)
        else:
            bins[fit].append(index)
            room[fit] -= length
    return bins


def even_slices(count: int, parts: int) -> list[range]:
    """`count` things in order, in `parts` consecutive slices whose sizes differ by one at most.

    >>> even_slices(5, 2)
    [range(0, 2), range(2, 5)]
    """
    return [range(count * part // parts, count * (part + 1) // parts) for part in range(parts)]
