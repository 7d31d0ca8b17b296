"""A comparison sets swarm against solo as SAPO's figure 3 does: scores by normalised round, with a test at every point.

Pure. A node's normalised round counts from its first judged round, so late joiners are compared at equal age. Rounds
form bins. Within a bin a node is one number, its mean score: challenges to one node depend on each other, nodes do not.
A bin has all nodes judged in it. Weak nodes that leave raise the curve although no node learned, so each band has its
number of nodes.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy import stats

from shoal.swarm.judge.messages import Condition

EXACT_WAYS = 20_000
"""Ways to deal the nodes to the conditions, up to which p is exact: 8 nodes against 8. Beyond, p comes from the normal
distribution, with the variance that ties leave."""
LEAST_NODES = 2
"""Nodes of each condition that a test needs."""
SIGNIFICANT = 0.05
TEST = "two-sided Mann-Whitney U test per bin of rounds, p adjusted by Benjamini-Hochberg over the bins"
COLOURS = {Condition.SWARM: "#2563c9", Condition.SOLO: "#d9730d"}
MARKERS = {Condition.SWARM: ("o", 6), Condition.SOLO: ("s", 10)}
"""Marker and size in points: equal scores hide neither condition."""

Curves: TypeAlias = Mapping[Condition, Mapping[str, Mapping[int, float]]]
"""Mean scores by condition, node and bin."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Score of one challenge, 0..1, after `round` training rounds of a node."""

    node: str
    arm: Condition
    round: int
    score: float


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


def mann_whitney(first: Sequence[float], second: Sequence[float]) -> RankTest:
    """Tests whether values of one sample tend to be larger (Mann and Whitney, 1947).

    For few values p is exact, ties included: the share of all ways to deal them into two samples of these sizes that
    are as extreme. Expects at least two values on each side.

    >>> mann_whitney([1, 2, 3], [4, 5, 6])
    RankTest(u=0.0, p=0.1, favours=0.0)
    """
    pairs = len(first) * len(second)
    few = math.comb(len(first) + len(second), len(first)) <= EXACT_WAYS
    method = stats.PermutationMethod(n_resamples=EXACT_WAYS) if few else "asymptotic"
    found = stats.mannwhitneyu(first, second, method=method)
    p = 1.0 if len({*first, *second}) == 1 else float(found.pvalue)  # equal values leave no variance to divide by
    return RankTest(float(found.statistic), p, float(found.statistic) / pairs)


def compare(results: Sequence[Judged], *, bin_rounds: int) -> tuple[Point, ...]:
    """Compares swarm with solo in every bin with a score."""
    curves, found = binned(results, bin_rounds), []
    for index in sorted({index for nodes in curves.values() for bins in nodes.values() for index in bins}):
        swarm, solo = ([bins[index] for bins in curves[one].values() if index in bins] for one in Condition)
        test = mann_whitney(swarm, solo) if min(len(swarm), len(solo)) >= LEAST_NODES else None
        found.append((index * bin_rounds, _band(swarm), _band(solo), test))
    p = [test.p for *_, test in found if test is not None]
    adjusted = iter(stats.false_discovery_control(p) if p else ())
    return tuple(Point(*one, None if one[-1] is None else float(next(adjusted))) for one in found)


def binned(results: Sequence[Judged], bin_rounds: int) -> Curves:
    """Mean scores of each node in its bins. A node judged under two conditions is two nodes."""
    scores: dict[Condition, dict[str, dict[int, list[float]]]] = {condition: {} for condition in Condition}
    first: dict[tuple[Condition, str], int] = {}
    for one in sorted(results, key=lambda one: one.round):
        index = (one.round - first.setdefault((one.arm, one.node), one.round)) // bin_rounds
        scores[one.arm].setdefault(one.node, {}).setdefault(index, []).append(one.score)
    return {
        condition: {node: {index: fmean(each) for index, each in bins.items()} for node, bins in nodes.items()}
        for condition, nodes in scores.items()
    }


def _band(values: Sequence[float]) -> Band:
    return Band(len(values), fmean(values), min(values), max(values)) if values else Band(0)


def comparison_png(points: Sequence[Point], bin_rounds: int) -> bytes:
    """Plots mean pass@1 with the band from worst to best node; filled markers show significant differences."""
    figure = Figure(figsize=(8, 5), layout="constrained", facecolor="white")
    axes, last = figure.subplots(), max((point.round for point in points), default=0)
    for layer, condition in enumerate(reversed(Condition), 2):
        colour, (marker, size) = COLOURS[condition], MARKERS[condition]
        shown = [(point, band) for point in points if (band := getattr(point, condition)).nodes]
        rounds = [point.round for point, _ in shown]
        low, high, mean = ([getattr(band, name) for _, band in shown] for name in ("low", "high", "mean"))
        axes.fill_between(rounds, low, high, color=colour, alpha=0.15, lw=0)
        drawn: dict[str, Any] = {"color": colour, "marker": marker, "markersize": size}
        drawn |= {"clip_on": False, "zorder": layer}
        axes.plot(rounds, mean, mfc="white", label=condition.value, **drawn)
        if len(rounds) == 1:  # a band of no width
            axes.vlines(rounds, low, high, color=colour, alpha=0.4, lw=size)
        sure = [point.q is not None and point.q <= SIGNIFICANT for point, _ in shown]
        axes.plot(rounds, mean, linestyle="none", markevery=sure, **drawn)
    axes.set(ylabel="judged pass@1", ylim=(0, max(0.1, axes.get_ylim()[1])))
    axes.set_xlim(-bin_rounds / 2, last + bin_rounds / 2)
    axes.set_xticks([tick for tick in MaxNLocator(10, integer=True).tick_values(0, last) if 0 <= tick <= last])
    axes.legend(loc="best")
    figure.supxlabel(
        f"rounds since a node was first judged, in bins of {bin_rounds}\n{TEST}; filled: q <= {SIGNIFICANT:g}",
        fontsize="small",
    )
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150)
    return data.getvalue()
