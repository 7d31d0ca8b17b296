"""The comparison's picture shows all nodes on the left and the cohort on the right."""

import io
import math
from collections.abc import Sequence
from typing import Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shoal.swarm.judge.comparison import SIGNIFICANT, TEST, Band, Comparison, Point

INK, MUTED, BLUE, ORANGE = "#1c2733", "#66727f", "#2563c9", "#d9730d"
STYLE = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6eaee",
    "legend.frameon": False,
}


def comparison_png(comparison: Comparison) -> bytes:
    """Plots mean pass@1 with the band from worst to best node; filled markers show significant differences."""
    with rc_context(STYLE):  # type: ignore[arg-type]  # its stub knows fixed keys only
        figure = Figure(figsize=(12, 5), layout="constrained", facecolor="white")
        raw, cohort = figure.subplots(1, 2, sharey=True)
        _plot(raw, comparison.raw, "all nodes judged in a bin")
        _plot(cohort, comparison.cohort, "cohort: the nodes that reached the horizon")
        raw.set_ylabel("judged pass@1")
        raw.set_ylim(bottom=0)
        figure.supxlabel(
            f"rounds since a node was first judged, in bins of {comparison.bin_rounds}\n{TEST}; "
            f"filled: q <= {SIGNIFICANT:g}",
            size=8.5,
            color=MUTED,
        )
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=150)
    return data.getvalue()


def _plot(axes: Axes, points: Sequence[Point], title: str) -> None:
    axes.set_title(title)
    rounds = [point.round for point in points]
    for name, bands, colour in (
        ("swarm", [point.swarm for point in points], BLUE),
        ("solo", [point.solo for point in points], ORANGE),
    ):
        most = max((band.nodes for band in bands), default=0)
        low, high, mean = _gapped(bands, "low"), _gapped(bands, "high"), _gapped(bands, "mean")
        axes.fill_between(rounds, low, high, color=colour, alpha=0.15, lw=0)
        axes.plot(rounds, mean, color=colour, label=f"{name}, up to {most} nodes")
    for point in points:
        if point.swarm.mean is not None:
            filled = point.q is not None and point.q <= SIGNIFICANT
            axes.plot(point.round, point.swarm.mean, "o", ms=5, color=BLUE, mfc=BLUE if filled else "white")
    if points:
        axes.legend(loc="best")
    else:
        axes.text(0.5, 0.5, "a condition has no nodes", ha="center", transform=axes.transAxes, color=MUTED)


def _gapped(bands: Sequence[Band], name: Literal["mean", "low", "high"]) -> list[float]:
    """Numbers of the bins; NaN leaves a gap where no node was judged."""
    values: list[float | None] = [getattr(band, name) for band in bands]
    return [math.nan if value is None else value for value in values]
