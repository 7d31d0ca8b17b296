"""The cells as tables beside the paper's numbers, and what may be said of them."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean, pstdev

from experiments.grid import Record, markdown

PAPER = {"8/0": 561.79, "6/2": 854.43, "4/4": 1093.31, "2/6": 945.87}
PAPER_OSCILLATION = {"8/0": 0.074, "6/2": 0.096, "4/4": 0.089, "2/6": 0.156}
WINDOW = 20
BEGUN = 0.1
"""Own reward, moving average of 5 rounds, from which a node counts as having begun to learn."""
HEAD = (
    *("regime, own/external", "seeds", "cumulative own reward", "over 8/0, by seed", "paper's"),
    *("first to last node begins in round", "held out at first", "held out at the end", "own groups a round", "taken"),
    *("oscillation", "8/0's, by fewer own groups", "paper's"),
)


def summary(runs: Mapping[str, Record]) -> list[Record]:
    """A record per regime and cell, over its seeds."""
    names = dict.fromkeys(tuple(key.rsplit(":", 2)[:2]) for key in runs)
    cells = []
    for regime, name in names:
        same = [record for key, record in runs.items() if key.rsplit(":", 2)[:2] == [regime, name]]
        cumulative = [float(record["cumulative"]) for record in same]
        curves = [[fmean(row) for row in record["rewards"]] for record in same]
        cells.append(
            {
                "regime": regime,
                "cell": name,
                "seeds": len(same),
                "cumulative": cumulative,
                "cumulative_mean": fmean(cumulative),
                "begins": [beginnings(record) for record in same],
                "held_out_first": fmean(record["evaluations"][0][1] for record in same),
                "held_out_last": [record["evaluations"][-1][1] for record in same],
                "taken": fmean(fmean(record["taken"]) for record in same),
                "own": fmean(fmean(record["own"]) for record in same),
                "oscillation": fmean(oscillation(curve) for curve in curves),
            }
        )
    return cells


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of a mean difference of pairs, by the exact sign-flip test: of all signs, the share as far from 0.

    With three pairs it is never below 0.25, with six 0.031.

    >>> sign_flip_p([1.0, 2.0, 3.0]), sign_flip_p([1.0, -1.0])
    (0.25, 1.0)
    """
    seen = abs(math.fsum(differences))
    flipped = [
        abs(math.fsum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return fmean(total >= seen - 1e-9 for total in flipped)


def comparisons(runs: Mapping[str, Record]) -> str:
    """Each cell against 8/0 with the same regime and seed: in mean own reward and in held-out accuracy at the end."""
    rows = []
    for cell in dict.fromkeys(key.split(":")[1] for key in runs if ":8/0:" not in key):
        pairs = [
            (key.split(":")[0], record, runs[key.replace(cell, "8/0", 1)])
            for key, record in runs.items()
            if key.split(":")[1] == cell and key.replace(cell, "8/0", 1) in runs
        ]
        regimes = list(dict.fromkeys(regime for regime, _, _ in pairs))
        for regime in [*regimes, *(["all"] if len(regimes) > 1 else [])]:
            same = [(one, alone) for where, one, alone in pairs if regime in (where, "all")]
            reward = [mean_reward(one) - mean_reward(alone) for one, alone in same]
            nodes = [a > b for one, alone in same for a, b in zip(by_node(one), by_node(alone), strict=True)]
            held = [one["evaluations"][-1][1] - alone["evaluations"][-1][1] for one, alone in same]
            columns = [*difference_columns(reward), f"{sum(nodes)} of {len(nodes)}", *difference_columns(held)]
            rows.append([f"{regime} {cell}", str(len(same)), *columns])
    head = ["cell less 8/0", "pairs", "own reward", "ahead", "p", "nodes ahead", "held out", "ahead", "p"]
    return markdown(head, rows)


def difference_columns(differences: Sequence[float]) -> list[str]:
    """Mean, how many are above 0, and the sign-flip test's p."""
    ahead = sum(difference > 0 for difference in differences)
    return [f"{fmean(differences):+.3f}", f"{ahead} of {len(differences)}", f"{sign_flip_p(differences):.3f}"]


def mean_reward(record: Record) -> float:
    """Of own groups, over nodes and rounds."""
    return fmean(fmean(row) for row in record["rewards"])


def by_node(record: Record) -> list[float]:
    """Mean own reward of each node; nodes of a swarm learn from one another and are no independent samples."""
    return [fmean(curve) for curve in zip(*record["rewards"], strict=True)]


def beginnings(record: Record) -> list[int]:
    """The round in which each node has begun to learn, in order; the number of rounds for one that has not."""
    curves = [moving(list(curve), 5) for curve in zip(*record["rewards"], strict=True)]
    return sorted(next((i for i, value in enumerate(curve) if value >= BEGUN), len(curve)) for curve in curves)


def oscillation(curve: list[float]) -> float:
    """Standard deviation about the moving average, over the mean, in the second half."""
    half = len(curve) // 2
    rest = [value - average for value, average in zip(curve, moving(curve), strict=True)][half:]
    mean = fmean(curve[half:])
    return pstdev(rest) / mean if mean else 0.0


def moving(curve: list[float], window: int = WINDOW) -> list[float]:
    """The mean of up to `window` rounds, the last one included.

    >>> moving([0.0, 2.0, 4.0], 2)
    [0.0, 1.0, 3.0]
    """
    return [fmean(curve[max(0, i + 1 - window) : i + 1]) for i in range(len(curve))]


def table(cells: list[Record]) -> str:
    """Each cell beside the paper's, as ratios to 8/0 of the same regime and seeds."""
    alone = {cell["regime"]: cell for cell in cells if cell["cell"] == "8/0"}
    rows = []
    for cell in cells:
        base = alone.get(cell["regime"])
        ratios = []
        if base is not None:
            pairs = zip(cell["cumulative"], base["cumulative"], strict=False)
            ratios = [ours / theirs for ours, theirs in pairs if theirs]
        paper = PAPER.get(cell["cell"])
        rows.append(
            [
                f"{cell['regime']} {cell['cell']}",
                str(cell["seeds"]),
                " ".join(f"{value:.0f}" for value in cell["cumulative"]),
                " ".join(f"{value:.2f}" for value in ratios),
                f"{paper / PAPER['8/0']:.2f}" if paper else "",
                " ".join(f"{rounds[0]}-{rounds[-1]}" for rounds in cell["begins"]),
                f"{cell['held_out_first']:.3f}",
                " ".join(f"{value:.3f}" for value in cell["held_out_last"]),
                f"{cell['own']:.2f}",
                f"{cell['taken']:.2f}",
                f"{cell['oscillation']:.3f}",
                f"{base['oscillation'] * math.sqrt(base['own'] / cell['own']):.3f}" if base else "",
                f"{PAPER_OSCILLATION[cell['cell']]:.3f}" if paper else "",
            ]
        )
    return markdown(HEAD, rows)
