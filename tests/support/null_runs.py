"""Simulated comparisons of two models whose truth is known, looked at after every question.

    python tests/support/null_runs.py RUNS QUESTIONS [SEED]

Prints a line of JSON: the share of null runs (two equal models) in which a claim was made at any time, and for true
differences the median number of questions until the claim, with the size of a fixed test of 80 % power.
"""

import json
import sys
from statistics import median

import numpy as np

from shoal.confidence import MeanBounds

EFFECTS = (0.03, 0.05, 0.1, 0.2)
ERROR = 0.05
BASE = 0.4
"""Accuracy of the worse model in the runs with a true difference."""
POWER_RUNS = 100


def differences(rng: np.random.Generator, questions: int) -> np.ndarray:
    """Differences of two equal models' scores, (questions,): questions differ in difficulty, runs in all else."""
    hardness, samples = rng.uniform(0.1, 5, 2), int(rng.choice([1, 2, 8]))
    chance = rng.beta(*hardness, questions)
    if rng.random() < 0.3:  # the same model: paired answers are alike
        agree = rng.random(questions) < rng.random()
        first = rng.binomial(samples, chance) / samples
        return np.where(agree, 0.0, rng.binomial(samples, chance) / samples - first)
    return (rng.binomial(samples, chance) - rng.binomial(samples, chance)) / samples


def claimed_after(values: np.ndarray) -> int | None:
    """Number of questions after which either model is called better; None when that never happens."""
    bounds = MeanBounds(ERROR)
    for value in values:
        bounds.add(float(value))
        if bounds.low > 0 or bounds.high < 0:
            return bounds.count
    return None


def null_runs(runs: int, questions: int, seed: int) -> float:
    """Share of runs of two equal models with a claim."""
    rngs = np.random.default_rng(seed).spawn(runs)
    return sum(claimed_after(differences(rng, questions)) is not None for rng in rngs) / runs


def power(effect: float, runs: int, seed: int) -> dict[str, float | None]:
    """Median questions until the claim at a true difference, and what a fixed two-sided z-test of 80 % power asks."""
    rng = np.random.default_rng(seed)
    variance = BASE * (1 - BASE) + (BASE + effect) * (1 - BASE - effect)
    fixed = (1.96 + 0.8416) ** 2 * variance / effect**2
    found = []
    for _ in range(runs):
        first, second = rng.random((2, int(4 * fixed)))
        claim = claimed_after((second < BASE + effect).astype(float) - (first < BASE))
        found.append(float("inf") if claim is None else claim)
    middle = median(found)
    return {"effect": effect, "fixed": round(fixed), "sequential": middle if np.isfinite(middle) else None}


if __name__ == "__main__":
    runs, questions, seed = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    table = [power(effect, min(runs, POWER_RUNS), seed) for effect in EFFECTS]
    print(
        json.dumps(
            {
                "runs": runs,
                "questions": questions,
                "seed": seed,
                "false_claims": null_runs(runs, questions, seed),
                "power": table,
            }
        )
    )
