"""The curves of every node, and its accuracy at the end beside that of each specialist."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from experiments.grid import Record, markdown

COLOURS = ("#c5373d", "#2563c9", "#2a8f5b")


def table(runs: Mapping[str, Record], families: list[str]) -> str:
    """A row per condition, node and task: accuracy by seed, its mean, and that over the specialist's."""
    rows = []
    for condition in dict.fromkeys(key.split(":")[0] for key in runs):
        same = [record for key, record in runs.items() if key.split(":")[0] == condition]
        for node, own in enumerate(families):
            for place, task in enumerate(families):
                ends = [record["curves"][node][-1][1 + place] for record in same]
                expert = [record["curves"][place][-1][1 + place] for record in same]
                before = fmean(record["curves"][node][0][1 + place] for record in same)
                share = fmean(ends) / fmean(expert) if any(expert) else 0.0
                each = " ".join(f"{value:.3f}" for value in ends)
                rows.append([f"{condition} {own}", task, f"{before:.3f}", each, f"{fmean(ends):.3f}", f"{share:.2f}"])
    return markdown(["node", "task", "before", "after, by seed", "mean", "over the specialist's"], rows)


def draw(path: Path, runs: Mapping[str, Record], families: list[str]) -> None:
    """A row of panels per condition, a panel per task; a line per node, mean of the seeds."""
    conditions = list(dict.fromkeys(key.split(":")[0] for key in runs))
    figure = Figure(figsize=(4 * len(families), 2.8 * len(conditions)), layout="constrained")
    panels = figure.subplots(len(conditions), len(families), squeeze=False, sharex=True, sharey=True)
    for row, condition in zip(panels, conditions, strict=True):
        same = [record for key, record in runs.items() if key.split(":")[0] == condition]
        for place, (axes, task) in enumerate(zip(row, families, strict=True)):
            for node, own in enumerate(families):
                steps = [one[0] for one in same[0]["curves"][node]]
                points = [fmean(record["curves"][node][i][1 + place] for record in same) for i in range(len(steps))]
                axes.plot(steps, points, color=COLOURS[node], lw=2.2 if own == task else 1.0, label=own)
            axes.set_title(f"{condition}: {task}", loc="left", fontsize=9)
        row[0].set_ylabel("held out, sampled")
    panels[0][0].legend(title="specialist of", frameon=False, fontsize=7)
    figure.savefig(path, dpi=90)
