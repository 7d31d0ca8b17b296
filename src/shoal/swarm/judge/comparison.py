"""Swarm against solo, as SAPO's figure 3 draws it: judged scores by normalised round, with a test at every point. Pure.

A node's normalised round is its round less the first at which it was judged, so that late joiners are compared with
others at the same age. Rounds are put into bins; within a bin a node is one number, its mean score, however often it
was judged: challenges to one node are not independent of each other, nodes are.

    raw      every bin has whoever was judged in it
    cohort   only nodes that reached the horizon, in every bin; a bin in which one was not judged has its last score

Weak nodes that leave raise the raw curve without anybody learning; behind every point of the cohort's are the same
nodes. The cohort still says nothing of those who left, which is why both are given.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from shoal.swarm.judge.condition import Arm

EXACT_UP_TO = 100
"""Nodes of both arms together up to which p is exact; beyond it is approximated by the normal distribution."""
SIGNIFICANT = 0.05
TEST = "two-sided Mann-Whitney U test per bin of rounds, p adjusted by Benjamini-Hochberg over the bins"


@dataclass(frozen=True, slots=True)
class Judged:
    """The score of one challenge, 0..1, taken by a node after so many of its rounds."""

    node: str
    arm: Arm
    round: int
    score: float


@dataclass(frozen=True, slots=True)
class RankTest:
    """A Mann-Whitney U test."""

    u: float
    """Pairs in which the first sample's value is larger; ties count one half."""
    p: float
    """Two-sided."""
    favours: float
    """`u` as a share of all pairs: the chance that a value of the first sample is larger. 0.5 says nothing."""


@dataclass(frozen=True, slots=True)
class Band:
    """The nodes of one arm in one bin; None where there are none."""

    nodes: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{'-' if self.mean is None else f'{self.mean:.3f}'} ({self.nodes})"


@dataclass(frozen=True, slots=True)
class Point:
    """Both arms in one bin. Without nodes on both sides there is no test."""

    round: int
    """The first normalised round of the bin."""
    swarm: Band
    solo: Band
    test: RankTest | None
    q: float | None
    """The test's p, adjusted."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All bins, once of everybody and once of the cohort."""

    bin_rounds: int
    horizon: int | None
    """The first normalised round of the last bin that the cohort reached; None when an arm is empty."""
    raw: tuple[Point, ...]
    cohort: tuple[Point, ...]


def mann_whitney(first: Sequence[float], second: Sequence[float]) -> RankTest:
    """Whether values of one sample tend to be larger (Mann and Whitney, 1947).

    Given the values, ties included, p is exact: the share of all ways to deal them into two samples of these sizes
    that are as extreme. Expects at least one value on each side.

    >>> mann_whitney([1, 2, 3], [4, 5, 6])
    RankTest(u=0.0, p=0.1, favours=0.0)
    """
    n, m = len(first), len(second)
    if not n or not m:
        raise ValueError(f"expected values on both sides, got {n} and {m}")
    doubled = _doubled_midranks([*first, *second])
    u = sum(doubled[:n]) / 2 - n * (n + 1) / 2
    p = _exact_p(doubled, n) if n + m <= EXACT_UP_TO else _normal_p(u, doubled, n)
    return RankTest(u, p, u / (n * m))


def benjamini_hochberg(p: Sequence[float]) -> list[float]:
    """Adjusted p: calling those up to q significant keeps the false share of them at q (Benjamini, Hochberg, 1995).

    >>> [round(q, 4) for q in benjamini_hochberg([0.01, 0.04, 0.03, 0.5])]
    [0.04, 0.0533, 0.0533, 0.5]
    """
    adjusted, lowest = [0.0] * len(p), 1.0
    for rank, i in zip(range(len(p), 0, -1), sorted(range(len(p)), key=p.__getitem__, reverse=True), strict=True):
        lowest = min(lowest, p[i] * len(p) / rank)
        adjusted[i] = lowest
    return adjusted


def compared(results: Sequence[Judged], *, bin_rounds: int, reached_by: float = 0.5) -> Comparison:
    """Swarm against solo. The horizon is the last bin that `reached_by` of the nodes of each arm reached."""
    if bin_rounds < 1 or not 0 < reached_by <= 1:
        raise ValueError(f"expected bins of at least 1 round and a share in (0, 1], got {bin_rounds} and {reached_by}")
    curves = binned(results, bin_rounds)
    horizon = _horizon(curves, reached_by)
    cohort = {arm: _carried(nodes, horizon) for arm, nodes in curves.items()} if horizon is not None else {}
    return Comparison(
        bin_rounds,
        None if horizon is None else horizon * bin_rounds,
        _points(curves, bin_rounds),
        _points(cohort, bin_rounds),
    )


def binned(results: Sequence[Judged], bin_rounds: int) -> dict[Arm, dict[str, dict[int, float]]]:
    """By arm and node, the mean score in each bin in which it was judged. A node in two arms is two nodes."""
    first: dict[tuple[Arm, str], int] = {}
    for one in results:
        key = one.arm, one.node
        first[key] = min(first.get(key, one.round), one.round)
    scores: dict[tuple[Arm, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in results:
        key = one.arm, one.node
        scores[key][(one.round - first[key]) // bin_rounds].append(one.score)
    curves: dict[Arm, dict[str, dict[int, float]]] = {arm: {} for arm in Arm}
    for (arm, node), bins in sorted(scores.items()):
        curves[arm][node] = {index: fmean(values) for index, values in sorted(bins.items())}
    return curves


def _horizon(curves: Mapping[Arm, Mapping[str, Mapping[int, float]]], reached_by: float) -> int | None:
    if not all(curves.values()):
        return None
    lasts = [sorted((max(bins) for bins in nodes.values()), reverse=True) for nodes in curves.values()]
    return min(last[math.ceil(reached_by * len(last)) - 1] for last in lasts)


def _carried(nodes: Mapping[str, Mapping[int, float]], horizon: int) -> dict[str, dict[int, float]]:
    """The nodes that reached the horizon, with a value in every bin up to it; all were judged in bin 0."""
    cohort: dict[str, dict[int, float]] = {}
    for node, bins in nodes.items():
        if max(bins) < horizon:
            continue
        filled, score = dict[int, float](), bins[0]
        for index in range(horizon + 1):
            score = filled[index] = bins.get(index, score)
        cohort[node] = filled
    return cohort


def _points(curves: Mapping[Arm, Mapping[str, Mapping[int, float]]], bin_rounds: int) -> tuple[Point, ...]:
    indices = sorted({index for nodes in curves.values() for bins in nodes.values() for index in bins})
    found = []
    for index in indices:
        swarm, solo = ([bins[index] for bins in curves[arm].values() if index in bins] for arm in (Arm.SWARM, Arm.SOLO))
        test = mann_whitney(swarm, solo) if swarm and solo else None
        found.append((index * bin_rounds, _band(swarm), _band(solo), test))
    adjusted = iter(benjamini_hochberg([test.p for *_, test in found if test is not None]))
    return tuple(Point(*one, None if one[-1] is None else next(adjusted)) for one in found)


def _band(values: Sequence[float]) -> Band:
    if not values:
        return Band(0)
    return Band(len(values), fmean(values), min(values), max(values))


def _doubled_midranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each value; equal values share the mean of theirs, so that these are whole numbers."""
    order = sorted(values)
    below = {value: order.index(value) for value in set(values)}
    return [2 * below[value] + order.count(value) + 1 for value in values]


def _exact_p(doubled: Sequence[int], n: int) -> float:
    """From the number of ways in which `n` of the ranks add up to each sum; both tails, each with what was seen."""
    ways = np.zeros((n + 1, sum(sorted(doubled)[-n:]) + 1))  # [how many, their sum]
    ways[0, 0] = 1
    for rank in doubled:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    counts, seen = ways[n], sum(doubled[:n])
    tail = min(counts[: seen + 1].sum(), counts[seen:].sum())
    return min(1.0, float(2 * tail / counts.sum()))


def _normal_p(u: float, doubled: Sequence[int], n: int) -> float:
    """With the variance that ties leave, and the correction for continuity."""
    size = len(doubled)
    m = size - n
    ties = sum(count**3 - count for count in (doubled.count(rank) for rank in set(doubled)))
    variance = n * m / 12 * (size + 1 - ties / (size * (size - 1)))
    if not variance:
        return 1.0
    z = max(0.0, abs(u - n * m / 2) - 0.5) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))
