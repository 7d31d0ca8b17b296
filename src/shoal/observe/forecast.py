"""Forecast of a run's last held-out accuracy from its evaluations so far. Pure.

A curve goes from a first accuracy to a last one: their difference times x^k / (x^k + 1), where x is the step over that
of the half way (Hill). It may begin late, and rise suddenly or slowly. The prior is even over a grid of curves that
reaches beyond the run's end, so that a run whose accuracy has not moved yet is not given up early. A measured accuracy
deviates from its curve by the noise of its questions and by `MISFIT`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import erf, sqrt

import numpy as np
from numpy.typing import NDArray

LEAST, LEAST_SHARE = 4, 0.25
"""Evaluations before a forecast, and the share of the run's steps that they must reach."""
OUTSIDE = 0.1
"""Probability that the last accuracy is outside the interval."""
DOUBT = 0.02
"""Probability of reaching the goal below which a run will not get there. It is small, as one looks many times."""
MISFIT = 0.05
"""Standard deviation between a run's accuracy and its curve."""
MARKS = np.linspace(0, 1, 201)
HALF_MARK = 0.0025
DEVIATIONS = np.linspace(-2, 2, 5)
"""First accuracies around the measured one, in its standard deviations."""
LASTS = 1 - np.cos(np.linspace(0, np.pi / 2, 31)) ** 3.4
"""Last accuracies, most of them near 1 and some near 0."""
HALVES, POWERS = np.geomspace(0.02, 4, 24), np.geomspace(0.7, 8, 7)
"""Half ways, in shares of the run's steps, and powers k."""
Z = np.linspace(-8, 8, 1601)
NORMAL = np.array([(1 + erf(z / sqrt(2))) / 2 for z in Z])
"""Distribution function of the standard normal."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Held-out accuracy that is expected after a run's last step."""

    below: tuple[float, ...]
    """Probability that it is at most each of `MARKS`."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Bounds that hold with a probability of 90 %."""
        low, high = (
            next(i for i, chance in enumerate(self.below) if chance >= share)
            for share in (OUTSIDE / 2, 1 - OUTSIDE / 2)
        )
        return float(MARKS[low]), float(MARKS[high])

    def chance(self, goal: float) -> float:
        """Probability that it reaches a goal."""
        return 1 - float(np.interp(goal - HALF_MARK, MARKS, self.below))

    def gets_there(self, goal: float) -> bool:
        """False for a goal that is out of reach with 98 %."""
        return self.chance(goal) >= DOUBT

    def sentence(self, goal: float) -> str:
        """Says whether the run gets to a goal."""
        said = "may get" if self.gets_there(goal) else "will not get"
        between = "its last held-out accuracy will be {:.0%} to {:.0%} (90%)".format(*self.bounds)
        return f"this run {said} to {goal:.0%}, with a chance of {self.chance(goal):.0%}: {between}"


def forecast(steps: Sequence[float], accuracies: Sequence[float], questions: float, of: int) -> Forecast | None:
    """Forecast of the accuracy after step `of`; None while the evaluations are too few, and after it.

    `steps` and `accuracies` are the evaluations so far, the one before the first step included.
    """
    if len(steps) < LEAST or not LEAST_SHARE <= steps[-1] / of < 1:
        return None
    begin = accuracies[0] + DEVIATIONS * np.sqrt(_variance(np.array([accuracies[0]]), questions))
    first_C, last_C, half_C, power_C = (axis.ravel() for axis in np.meshgrid(begin.clip(0, 1), LASTS, HALVES, POWERS))

    def curve(step: float) -> NDArray[np.float64]:
        risen_C = (step / of / half_C) ** power_C
        accuracy_C: NDArray[np.float64] = first_C + (last_C - first_C) * risen_C / (risen_C + 1)
        return accuracy_C

    fit_C = np.zeros(first_C.shape)
    for step, accuracy in zip(steps, accuracies, strict=True):
        mean_C = curve(step)
        variance_C = _variance(mean_C, questions)
        fit_C -= (accuracy - mean_C) ** 2 / (2 * variance_C) + np.log(variance_C) / 2
    weight_C = np.exp(fit_C - fit_C.max())
    end_E = np.bincount(np.rint(curve(of) * (MARKS.size - 1)).astype(int), weight_C / weight_C.sum(), MARKS.size)
    z_ME = (MARKS[:, None] + HALF_MARK - MARKS) / np.sqrt(_variance(MARKS, questions))
    below_M = np.interp(z_ME, Z, NORMAL) @ end_E
    return Forecast((*below_M[:-1].tolist(), 1.0))


def _variance(mean_C: NDArray[np.float64], questions: float) -> NDArray[np.float64]:
    """Variance of a measured accuracy around its curve."""
    return mean_C * (1 - mean_C) / questions + MISFIT**2
