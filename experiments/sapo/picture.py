"""Figures 1 and 2 of the paper at this scale: own reward per agent, and its moving average with a band."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from experiments.grid import Record
from experiments.sapo.verdict import moving

COLOURS = {"8/0": "#c5373d", "6/2": "#d9730d", "4/4": "#2563c9", "2/6": "#2a8f5b"}


def draw(folder: Path, runs: Mapping[str, Record]) -> None:
    """A panel per regime: the mean over agents and seeds, and the band from the worst to the best agent."""
    from matplotlib.figure import Figure

    regimes = list(dict.fromkeys(key.split(":")[0] for key in runs))
    figure = Figure(figsize=(6 * len(regimes), 4), layout="constrained")
    panels = figure.subplots(1, len(regimes), squeeze=False)[0]
    for axes, regime in zip(panels, regimes, strict=True):
        for cell, colour in COLOURS.items():
            same = [record for key, record in runs.items() if key.rsplit(":", 1)[0] == f"{regime}:{cell}"]
            if not same:
                continue
            agents = [moving(list(curve)) for record in same for curve in zip(*record["rewards"], strict=True)]
            rounds = range(len(agents[0]))
            by_round = list(zip(*agents, strict=True))
            axes.plot(rounds, [fmean(values) for values in by_round], color=colour, label=cell)
            axes.fill_between(
                rounds, [min(v) for v in by_round], [max(v) for v in by_round], color=colour, alpha=0.12, lw=0
            )
        axes.set_title(f"reward: {regime}", loc="left")
        axes.set_xlabel("round")
        axes.set_ylabel("own reward, moving average of 20")
        axes.legend(title="own/external", frameon=False)
    figure.savefig(folder / "sapo.png", dpi=130)
