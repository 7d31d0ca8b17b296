"""The picture of `shoal swarm demo` shows held-out accuracy alone and in the swarm, and the external groups."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from shoal.observe.metrics import read_records
from shoal.observe.report.figure import BLUE, GREEN, MUTED, ORANGE, PURPLE, RED, STYLE, TEAL

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL)


def swarm_png(
    folder: Path, styles: Sequence[tuple[str, str, str]], names: Sequence[str], external: Mapping[str, float]
) -> bytes:
    """Plots the runs of a folder; a style is (condition, line style, legend), `external` the external groups per
    step."""
    with rc_context(STYLE):  # type: ignore[arg-type]  # its stub knows fixed keys only
        figure = Figure(figsize=(11, 4.5), layout="constrained", facecolor="white")
        curves, bars = figure.subplots(1, 2, width_ratios=[2.2, 1])
        for name, colour in zip(names, COLOURS * len(names), strict=False):
            for condition, style, words in styles:
                steps, accuracy = _evaluations(folder / f"{condition}-{name}" / "metrics.jsonl")
                curves.plot(steps, accuracy, style, color=colour, label=f"{name}, {words}", marker="o", ms=3)
        curves.set_title("held-out accuracy, sampled")
        curves.set_xlabel("step", color=MUTED)
        curves.set_ylim(0, 1)
        curves.yaxis.set_major_formatter(PercentFormatter(1.0))
        curves.legend(loc="upper left", ncols=2)
        bars.bar(list(names), [external[name] for name in names], color=list(COLOURS * len(names))[: len(names)])
        bars.set_title("groups of others trained per step")
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=150)
    return data.getvalue()


def _evaluations(path: Path) -> tuple[list[float], list[float]]:
    found = [(float(str(r["step"])), float(str(r["sampled"]))) for r in read_records(path) if r["kind"] == "eval"]
    return [step for step, _ in found], [value for _, value in found]
