"""Figures 1 and 2 of the paper at this scale."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.grid import Record
from experiments.sapo_stacked.verdict import WINDOW, moving

COLOURS = {"8/0": "#c5373d", "6/2": "#d9730d", "4/4": "#2563c9", "2/6": "#2a8f5b"}


def draw(folder: Path, runs: Mapping[str, Record]) -> None:
    """figure1.png and figure2.png, with a row or a panel for each regime; nothing without a cell of the paper's."""
    found = {tuple(key.rsplit(":", 1)[0].split(":")): key for key in runs}
    regimes = list(dict.fromkeys(regime for regime, _ in found))
    cells = [cell for cell in COLOURS if any(name == cell for _, name in found)]
    if not cells:
        return
    draw_agents(folder / "figure1.png", runs, regimes, cells)
    figure = Figure(figsize=(6 * len(regimes), 4), layout="constrained")
    panels = figure.subplots(1, len(regimes), squeeze=False, sharey=True)[0]
    for axes, regime in zip(panels, regimes, strict=True):
        for cell in cells:
            draw_band(axes, cell, curves_of(runs, regime, cell))
        axes.set_title(regime, loc="left")
        axes.set_xlabel("round")
        axes.legend(title="own/external", frameon=False, loc="upper left")
    panels[0].set_ylabel(f"own reward, moving average of {WINDOW} rounds")
    figure.savefig(folder / "figure2.png", dpi=110)


def draw_agents(path: Path, runs: Mapping[str, Record], regimes: list[str], cells: list[str]) -> None:
    """Figure 1: the reward of every agent of the first seed, and the cumulative reward of each seed."""
    figure = Figure(figsize=(3 * len(cells), 2.6 * len(regimes)), layout="constrained")
    rows = figure.subplots(len(regimes), len(cells), squeeze=False, sharex=True, sharey=True)
    for panels, regime in zip(rows, regimes, strict=True):
        for axes, cell in zip(panels, cells, strict=True):
            agents = curves_of(runs, regime, cell)
            for curve in agents[0] if agents else []:
                axes.plot(moving(curve, 5), lw=0.7, alpha=0.8)
            totals = [sum(sum(curve) for curve in same) for same in agents]
            axes.set_title(f"{regime} {cell}: {' '.join(f'{total:.0f}' for total in totals)}", loc="left", fontsize=9)
        panels[0].set_ylabel("own reward of each agent, 5 rounds", fontsize=8)
    figure.savefig(path, dpi=70)


def draw_band(axes: Axes, cell: str, seeds: list[list[list[float]]]) -> None:
    """Figure 2: the mean over agents and seeds; the band is from the worst to the best agent, mean of the seeds."""
    if not seeds:
        return
    smooth = [[moving(curve) for curve in agents] for agents in seeds]
    by_round = [[[curve[i] for curve in agents] for agents in smooth] for i in range(len(smooth[0][0]))]
    axes.plot([fmean(map(fmean, seeds)) for seeds in by_round], color=COLOURS[cell], label=cell)
    low, high = ([fmean(map(end, seeds)) for seeds in by_round] for end in (min, max))
    axes.fill_between(range(len(low)), low, high, color=COLOURS[cell], alpha=0.1, lw=0)


def curves_of(runs: Mapping[str, Record], regime: str, cell: str) -> list[list[list[float]]]:
    """Per seed and agent the own rewards by round."""
    same = [record for key, record in runs.items() if key.rsplit(":", 1)[0] == f"{regime}:{cell}"]
    return [[list(curve) for curve in zip(*record["rewards"], strict=True)] for record in same]
