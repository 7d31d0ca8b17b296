"""A comparison sets swarm against solo as SAPO's figure 3 does: scores by normalised round, with a test at every point.

Pure. A node's normalised round counts from its first judged round, so late joiners are compared at equal age. Rounds
form bins. Within a bin a node is one number, its mean score: challenges to one node depend on each other, nodes do not.

    raw      every bin has all nodes judged in it
    cohort   only nodes that reached the horizon, in every bin; a bin without a score repeats the last

Weak nodes that leave raise the raw curve although no node learned. Every point of the cohort has the same nodes, but it
tells nothing of those that left. Both curves are therefore given.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from scipy import stats

from shoal.swarm.judge.condition import Condition, Judged

EXACT_WAYS = 20_000
"""Ways to deal the nodes to the conditions, up to which p is exact: 8 nodes against 8. Beyond, p comes from the normal
distribution, with the variance that ties leave."""
LEAST_NODES = 2
"""Nodes of each condition that a test needs."""
SIGNIFICANT = 0.05
TEST = "two-sided Mann-Whitney U test per bin of rounds, p adjusted by Benjamini-Hochberg over the bins"


@dataclass(frozen=True, slots=True)
class RankTest:
    """A Mann-Whitney U test."""

    u: float
    """Pairs in which the first sample's value is larger; ties count one half."""
    p: float
    """Two-sided p."""
    favours: float
    """Share of `u` in all pairs: the chance that a value of the first sample is larger. 0.5 says nothing."""


@dataclass(frozen=True, slots=True)
class Band:
    """Scores of one condition in one bin; None without nodes."""

    nodes: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{'-' if self.mean is None else f'{self.mean:.3f}'} ({self.nodes})"


@dataclass(frozen=True, slots=True)
class Point:
    """Both conditions in one bin; without two nodes on each side there is no test."""

    round: int
    """First normalised round of the bin."""
    swarm: Band
    solo: Band
    test: RankTest | None
    q: float | None
    """Adjusted p of the test."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All bins, once with all nodes and once with the cohort."""

    bin_rounds: int
    horizon: int | None
    """First normalised round of the last bin that the cohort reached; None when a condition has no nodes."""
    raw: tuple[Point, ...]
    cohort: tuple[Point, ...]


def mann_whitney(first: Sequence[float], second: Sequence[float]) -> RankTest:
    """Tests whether values of one sample tend to be larger (Mann and Whitney, 1947).

    For few values p is exact, ties included: the share of all ways to deal them into two samples of these sizes that
    are as extreme. Expects at least two values on each side.

    >>> mann_whitney([1, 2, 3], [4, 5, 6])
    RankTest(u=0.0, p=0.1, favours=0.0)
    """
    n, m = len(first), len(second)
    if min(n, m) < LEAST_NODES:
        raise ValueError(f"expected at least {LEAST_NODES} values on both sides, got {n} and {m}")
    few = math.comb(n + m, n) <= EXACT_WAYS
    method = stats.PermutationMethod(n_resamples=EXACT_WAYS) if few else "asymptotic"
    found = stats.mannwhitneyu(first, second, method=method)
    p = 1.0 if len({*first, *second}) == 1 else float(found.pvalue)  # equal values leave no variance to divide by
    return RankTest(float(found.statistic), p, float(found.statistic) / (n * m))


def compare(results: Sequence[Judged], *, bin_rounds: int, reached_by: float = 0.5) -> Comparison:
    """Compares swarm with solo. The horizon is the last bin that a share `reached_by` of each condition's nodes
    reached."""
    if bin_rounds < 1 or not 0 < reached_by <= 1:
        raise ValueError(f"expected bins of at least 1 round and a share in (0, 1], got {bin_rounds} and {reached_by}")
    curves = binned(results, bin_rounds)
    horizon = _horizon(curves, reached_by)
    cohort = {condition: _carried(nodes, horizon) for condition, nodes in curves.items()} if horizon is not None else {}
    return Comparison(
        bin_rounds,
        None if horizon is None else horizon * bin_rounds,
        _points(curves, bin_rounds),
        _points(cohort, bin_rounds),
    )


def binned(results: Sequence[Judged], bin_rounds: int) -> dict[Condition, dict[str, dict[int, float]]]:
    """Mean scores by condition, node and bin. A node judged under two conditions is two nodes."""
    first: dict[tuple[Condition, str], int] = {}
    for one in results:
        key = one.arm, one.node
        first[key] = min(first.get(key, one.round), one.round)
    scores: dict[tuple[Condition, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in results:
        key = one.arm, one.node
        scores[key][(one.round - first[key]) // bin_rounds].append(one.score)
    curves: dict[Condition, dict[str, dict[int, float]]] = {condition: {} for condition in Condition}
    for (condition, node), bins in sorted(scores.items()):
        curves[condition][node] = {index: fmean(values) for index, values in sorted(bins.items())}
    return curves


def _horizon(curves: Mapping[Condition, Mapping[str, Mapping[int, float]]], reached_by: float) -> int | None:
    if not all(curves.values()):
        return None
    lasts = [sorted((max(bins) for bins in nodes.values()), reverse=True) for nodes in curves.values()]
    return min(last[math.ceil(reached_by * len(last)) - 1] for last in lasts)


def _carried(nodes: Mapping[str, Mapping[int, float]], horizon: int) -> dict[str, dict[int, float]]:
    """Fills the bins of nodes that reached the horizon; every node was judged in bin 0."""
    cohort: dict[str, dict[int, float]] = {}
    for node, bins in nodes.items():
        if max(bins) < horizon:
            continue
        filled, score = dict[int, float](), bins[0]
        for index in range(horizon + 1):
            score = filled[index] = bins.get(index, score)
        cohort[node] = filled
    return cohort


def _points(curves: Mapping[Condition, Mapping[str, Mapping[int, float]]], bin_rounds: int) -> tuple[Point, ...]:
    indices = sorted({index for nodes in curves.values() for bins in nodes.values() for index in bins})
    found = []
    for index in indices:
        swarm, solo = (
            [bins[index] for bins in curves[condition].values() if index in bins]
            for condition in (Condition.SWARM, Condition.SOLO)
        )
        test = mann_whitney(swarm, solo) if min(len(swarm), len(solo)) >= LEAST_NODES else None
        found.append((index * bin_rounds, _band(swarm), _band(solo), test))
    p = [test.p for *_, test in found if test is not None]
    adjusted = iter(stats.false_discovery_control(p) if p else ())
    return tuple(Point(*one, None if one[-1] is None else float(next(adjusted))) for one in found)


def _band(values: Sequence[float]) -> Band:
    if not values:
        return Band(0)
    return Band(len(values), fmean(values), min(values), max(values))
