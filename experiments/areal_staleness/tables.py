"""What is made of the runs: results.json, results.md and areal_staleness.png."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from experiments.grid import Record, markdown

PAPER = {
    "0": (42.0, 42.0),
    "1": (41.8, 42.1),
    "2": (40.0, 41.8),
    "4": (23.3, 42.2),
    "8": (35.7, 41.0),
    "16": (35.8, 38.7),
    "inf": (34.0, 36.9),
}
"""AReaL (arXiv 2505.24298), table 2: AIME24 of a 1.5B model with naive PPO and with the decoupled objective."""
COLOURS = {"naive": "#c5373d", "decoupled": "#2563c9", "double_sided": "#2a8f5b"}


def write_results(folder: Path, runs: Sequence[Record]) -> None:
    """Writes all three into `folder`."""
    grid = [run for run in runs if run["regime"] == "grid"]
    cells = summary(grid)
    regimes = {name: summary([run for run in runs if run["regime"] == name]) for name in names(runs) if name != "grid"}
    everything = {"grid": cells, **regimes}
    (folder / "results.json").write_text(json.dumps(everything, indent=1) + "\n")
    (folder / "results.md").write_text(tables(cells) + (regime_table(regimes) if regimes else ""))
    draw(folder / "areal_staleness.png", cells, grid)


def names(runs: Sequence[Record]) -> list[str]:
    """Of the regimes, the grid among them."""
    return list(dict.fromkeys(str(run["regime"]) for run in runs))


def summary(runs: Sequence[Record]) -> list[Record]:
    """A record per eta and objective: means over the seeds of what the runs ended with."""
    cells: list[Record] = []
    for eta, objective in dict.fromkeys((str(run["eta"]), str(run["objective"])) for run in runs):
        same = [run for run in runs if (run["eta"], run["objective"]) == (eta, objective)]
        last = [run["evaluations"][-1] for run in same]
        sampled = [evaluation["sampled"] for evaluation in last]
        cells.append(
            {
                "eta": eta,
                "objective": objective,
                "seeds": len(same),
                "sampled": fmean(sampled),
                "sampled_each": sampled,
                "sampled_deviation": stdev(sampled) if len(sampled) > 1 else 0.0,
                "greedy": fmean(evaluation["greedy"] for evaluation in last),
                "course": course(same),
                "before": fmean(run["evaluations"][0]["sampled"] for run in same),
                **{
                    name: fmean(run[name] for run in same)
                    for name in ("clipped_share", "masked_share", "capped_share", "ess")
                },
                "ratio_max": max(run["ratio_max"] for run in same),
            }
        )
    return cells


def course(runs: Sequence[Record]) -> list[tuple[int, float]]:
    """The steps at which all runs were evaluated after the first, and their mean accuracy there."""
    accuracies = [{e["step"]: e["sampled"] for e in run["evaluations"][1:]} for run in runs]
    steps = sorted(set.intersection(*map(set, accuracies)))
    return [(step, fmean(of[step] for of in accuracies)) for step in steps]


def tables(cells: Sequence[Record]) -> str:
    """Held-out accuracy by eta and objective beside the paper's, and what the importance ratios did."""
    etas = list(dict.fromkeys(cell["eta"] for cell in cells))
    objectives = list(dict.fromkeys(cell["objective"] for cell in cells))
    of = {(cell["eta"], cell["objective"]): cell for cell in cells}

    def accuracy(eta: str, objective: str) -> str:
        cell = of[eta, objective]
        return f"{100 * cell['sampled']:.1f} ± {100 * cell['sampled_deviation']:.1f}"

    def ratios(eta: str, objective: str) -> str:
        cell = of[eta, objective]
        removed = cell["clipped_share"] + cell["masked_share"]
        return f"{100 * removed:.1f} / {100 * cell['ess']:.0f}"

    first = markdown(
        ["eta", *objectives, "AReaL naive", "AReaL decoupled"],
        [[eta, *(accuracy(eta, o) for o in objectives), *(f"{x:.1f}" for x in PAPER[eta])] for eta in etas],
    )
    second = markdown(
        ["eta", *objectives, *(f"{o}, greedy" for o in objectives)],
        [
            [eta, *(ratios(eta, o) for o in objectives), *(f"{100 * of[eta, o]['greedy']:.1f}" for o in objectives)]
            for eta in etas
        ],
    )
    before = fmean(cell["before"] for cell in cells)
    steps = sorted(set.intersection(*({step for step, _ in cell["course"]} for cell in cells)))  # type: ignore[str-unpack]
    third = markdown(
        ["eta", *(f"{objective}, step {step}" for step in steps[:-1] for objective in objectives)],
        [
            [eta, *(f"{100 * dict(of[eta, o]['course'])[step]:.1f}" for step in steps[:-1] for o in objectives)]
            for eta in etas
        ],
    )
    return (
        f"Held-out accuracy in percent, sampled at temperature 1, after equal data: mean and standard deviation over "
        f"{cells[0]['seeds']} seeds; {100 * before:.1f} before training. AReaL's columns are AIME24 of a 1.5B "
        f"model.\n\n"
        f"{first}\nTokens without gradient (clipped or masked) / effective sample size, both in percent of the tokens; "
        f"and greedy accuracy.\n\n{second}\nHeld-out accuracy on the way there.\n\n{third}"
    )


def regime_table(regimes: Mapping[str, Sequence[Record]]) -> str:
    """Held-out accuracy in the other regimes."""
    rows = [
        [
            name,
            cell["eta"],
            cell["objective"],
            f"{100 * cell['sampled']:.1f} ± {100 * cell['sampled_deviation']:.1f}",
            " ".join(f"{100 * accuracy:.1f}" for _, accuracy in cell["course"]),  # type: ignore[str-unpack]
            f"{100 * cell['greedy']:.1f}",
            f"{100 * (cell['clipped_share'] + cell['masked_share']):.1f}",
            f"{100 * cell['ess']:.0f}",
        ]
        for name, cells in regimes.items()
        for cell in cells
    ]
    head = ["regime", "eta", "objective", "sampled", "on the way there", "greedy", "without gradient", "ess"]
    return (
        "\nOther regimes (experiment.toml says which), the same figures in percent; ess is the effective sample size."
        f"\n\n{markdown(head, rows)}"
    )


def draw(path: Path, cells: Sequence[Record], runs: Sequence[Record]) -> None:
    """Accuracy by eta, and the courses of the runs with the stalest data."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    etas = list(dict.fromkeys(cell["eta"] for cell in cells))
    for shift, objective in enumerate(dict.fromkeys(cell["objective"] for cell in cells)):
        mine = [cell for cell in cells if cell["objective"] == objective]
        x = [etas.index(cell["eta"]) + 0.08 * (shift - 1) for cell in mine]
        left.errorbar(
            x,
            [cell["sampled"] for cell in mine],
            yerr=[cell["sampled_deviation"] for cell in mine],
            color=COLOURS.get(objective),
            label=objective.replace("_", "-"),
            marker="o",
            capsize=3,
        )
        stalest = max((eta for eta in etas if eta != "inf"), key=float, default=etas[0])
        for run in runs:
            if (run["objective"], run["eta"]) == (objective, stalest):
                steps = [evaluation["step"] for evaluation in run["evaluations"]]
                right.plot(steps, [e["sampled"] for e in run["evaluations"]], color=COLOURS.get(objective), alpha=0.8)
    left.axhline(fmean(cell["before"] for cell in cells), color="#66727f", linestyle=":", label="before training")
    left.set_xticks(range(len(etas)), [eta if math.isfinite(float(eta)) else "∞" for eta in etas])
    left.set_xlabel("eta: versions between drawing and training")
    left.set_ylabel("held-out accuracy, sampled")
    left.set_title("After equal data, mean and deviation over the seeds", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    right.set_xlabel("training step")
    right.set_title(f"Each run with eta = {stalest}", fontsize=10)
    for axes in (left, right):
        axes.set_ylim(0, 1)
        axes.grid(color="#e6eaee")
    figure.savefig(path, dpi=130)
