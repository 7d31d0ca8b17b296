"""Cells beside their controls: paired tests over seeds, and curves."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from scipy import stats
from scipy.special import beta

from experiments.grid import Record, markdown
from experiments.sapo_stacked.picture import curves_of
from experiments.sapo_stacked.verdict import by_node, difference_columns, mean_reward, moving

COLOURS = {
    "4/4": "#2563c9",
    "4/4-same": "#2a8f5b",
    "4/4-order": "#7a3fb5",
    "8/0": "#c5373d",
    "16/0": "#111111",
    "4/0": "#d9730d",
    "4/4-shuffled": "#777777",
}
HEAD = (
    *("cell less control", "pairs", "own reward", "ahead", "p", "e", "own reward, first half"),
    *("nodes ahead", "held out", "ahead", "p"),
)


def e_value(ahead: int, pairs: int) -> float:
    """Evidence against "ahead in no more than half of the pairs"; it may be looked at after every pair.

    The likelihood of a chance that is uniform above one half, relative to that of one half. By Ville's inequality it
    ever reaches 20 with a probability of 1 in 20 at most (Ramdas et al. 2023, arXiv 2210.01948).

    >>> round(e_value(3, 3), 2), round(e_value(1, 3), 2)
    (3.75, 0.46)
    """
    a, b = ahead + 1, pairs - ahead + 1
    return float(2 ** (pairs + 1) * beta(a, b) * stats.beta.sf(0.5, a, b))


def beside_controls(runs: Mapping[str, Record], pairs: list[tuple[str, str]]) -> str:
    """A row per pair of cells: the first less the second, of the same regime and seed."""
    rows = []
    for cell, control in pairs:
        same = [
            (record, runs[other])
            for key, record in runs.items()
            if key.split(":")[1] == cell and (other := key.replace(f":{cell}:", f":{control}:")) in runs
        ]
        if not same:
            continue
        reward = [mean_reward(one) - mean_reward(other) for one, other in same]
        nodes = [a > b for one, other in same for a, b in zip(by_node(one), by_node(other), strict=True)]
        held = [one["evaluations"][-1][1] - other["evaluations"][-1][1] for one, other in same]
        e = e_value(sum(difference > 0 for difference in reward), len(reward))
        early = fmean(first_half(one) - first_half(other) for one, other in same)
        columns = [*difference_columns(reward), f"{e:.2f}", f"{early:+.3f}", f"{sum(nodes)} of {len(nodes)}"]
        rows.append([f"{cell} less {control}", str(len(same)), *columns, *difference_columns(held)])
    return markdown(HEAD, rows)


def first_half(record: Record) -> float:
    """Mean own reward in the first half of the rounds."""
    rounds = record["rewards"]
    return fmean(fmean(row) for row in rounds[: len(rounds) // 2])


def processor_table(runs: Mapping[str, Record]) -> str:
    """Seconds of processor of all nodes of a cell, start and evaluations included, by seed; cells without are left."""
    used = dict[str, list[str]]()
    for key, record in runs.items():
        if "processor_s" in record:
            used.setdefault(key.split(":")[1], []).append(f"{record['processor_s']:.0f}")
    return markdown(["cell", "seconds of processor, by seed"], [[cell, " ".join(by)] for cell, by in used.items()])


def draw_controls(path: Path, runs: Mapping[str, Record]) -> None:
    """The mean own reward of nodes and seeds, a line per cell."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    regime = next(iter(runs)).split(":")[0]
    for cell, colour in COLOURS.items():
        agents = [curve for seed in curves_of(runs, regime, cell) for curve in seed]
        if agents:
            axes.plot(moving([fmean(row) for row in zip(*agents, strict=True)], 9), color=colour, label=cell)
    axes.set_xlabel("round")
    axes.set_ylabel("own reward, moving average of 9 rounds")
    axes.legend(title="own/external", frameon=False)
    figure.savefig(path, dpi=90)
