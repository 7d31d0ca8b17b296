"""Covering arrays: few combinations of settings in which every pair of values that may go together does."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Case = dict[str, object]


def covering(
    axes: Mapping[str, Sequence[object]], allowed: Callable[[Case], bool], *, at_least: int = 0, seed: int = 0
) -> list[Case]:
    """Combinations that cover every pair which 4,096 random ones do, and at least so many; greedy, from a seed."""
    rng = random.Random(seed)
    drawn = [{name: rng.choice(values) for name, values in axes.items()} for _ in range(4096)]
    pool = list({_pairs(case): case for case in drawn if allowed(case)}.items())
    left = set().union(*(pairs for pairs, _ in pool))
    chosen: list[Case] = []
    while pool and (left or len(chosen) < at_least):
        best = max(range(len(pool)), key=lambda i: len(pool[i][0] & left))
        pairs, case = pool.pop(best)
        left -= pairs
        chosen.append(case)
    return chosen


def _pairs(case: Case) -> frozenset[tuple[tuple[str, str], tuple[str, str]]]:
    return frozenset(combinations(sorted((name, repr(value)) for name, value in case.items()), 2))


def title(case: Case) -> str:
    """Name of a test of the combination."""
    return "-".join(f"{name}={value}".replace(" ", "") for name, value in case.items())
