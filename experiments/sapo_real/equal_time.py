"""Sharing beside 8/0 after equal processor time of all nodes, and by round as the judge's figure 3."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

from experiments.grid import Record, markdown
from experiments.judge_figure.comparison import Judged
from experiments.sapo_stacked.verdict import sign_flip_p
from shoal.swarm.judge.messages import Condition

LAST = 10
"""Rounds before the cut whose own reward counts."""


def equal_time(runs: Mapping[str, Record]) -> str:
    """A row per sharing cell; both sides are cut where the cheaper one ends, and differences have 95 % intervals."""
    rows = []
    for cell in dict.fromkeys(key.split(":")[1] for key in runs if ":8/0:" not in key):
        same = [
            (record, alone)
            for key, record in runs.items()
            if key.split(":")[1] == cell and (alone := runs.get(key.replace(cell, "8/0", 1)))
        ]
        cuts = [cut(one, alone) for one, alone in same]
        if not cuts:
            continue
        held = [
            held_out_at(one, at) - held_out_at(alone, bt) for (one, alone), (at, bt) in zip(same, cuts, strict=True)
        ]
        own = [reward_at(one, at) - reward_at(alone, bt) for (one, alone), (at, bt) in zip(same, cuts, strict=True)]
        ratio = fmean(round_s(one) / round_s(alone) for one, alone in same)
        rounds = " ".join(f"{at:.0f}/{bt:.0f}" for at, bt in cuts)
        rows.append([f"{cell} less 8/0", str(len(same)), f"{ratio:.2f}", rounds, *columns(held), *columns(own)])
    head = ["after equal processor time", "seeds", "time of a round, over 8/0", "rounds of each, by seed"]
    return markdown([*head, "held out", "95 %", "p", f"own reward, last {LAST} rounds", "95 %", "p"], rows)


def round_s(record: Record) -> float:
    """Seconds of processor of a round of all nodes, later evaluations included and the start not."""
    return (float(str(record["processor_s"])) - float(str(record["start_s"]))) / len(record["rewards"])


def cut(one: Record, other: Record) -> tuple[float, float]:
    """Rounds of both after the time in which the cheaper one ends.

    >>> slow, fast = ({"rewards": [0] * 40, "processor_s": s, "start_s": 0.0} for s in (80.0, 40.0))
    >>> cut(slow, fast)
    (20.0, 40.0)
    """
    rounds = len(one["rewards"])
    least_s = rounds * min(round_s(one), round_s(other))
    return least_s / round_s(one), least_s / round_s(other)


def held_out_at(record: Record, at: float) -> float:
    """Held-out accuracy after so many rounds, between two evaluations on the line through them."""
    return float(np.interp(at, *zip(*record["evaluations"], strict=True)))


def reward_at(record: Record, at: float) -> float:
    """Mean own reward of the last rounds before the cut."""
    rows: list[list[float]] = record["rewards"][: max(1, int(at))]
    return fmean(map(fmean, rows[-LAST:]))


def columns(differences: Sequence[float]) -> list[str]:
    """Mean, its interval over seeds (Student's t) and the sign-flip test's p; one seed has no interval."""
    mean = fmean(differences)
    between = "-"
    if len(differences) > 1:
        half = stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences)
        between = f"{mean - half:+.3f} to {mean + half:+.3f}"
    return [f"{mean:+.3f}", between, f"{sign_flip_p(differences):.3f}"]


def judged(runs: Mapping[str, Any]) -> list[Judged]:
    """Held-out accuracy of 4/4 and of 8/0 as a judge's scores: a run is one number at each of its evaluations."""
    return [
        Judged(key, Condition.SOLO if cell == "8/0" else Condition.SWARM, at, score)
        for key, record in runs.items()
        if (cell := key.split(":")[1]) in ("4/4", "8/0")
        for at, score in record["evaluations"]
    ]
