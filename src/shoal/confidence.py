"""Confidence sequences: bounds of a mean that hold at all times at once, so one may look at any time and stop.

Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (JRSS B, 2024), section 4: a
gambler who starts with 1 and bets against the mean m multiplies the capital with probability at most `error` by
1 / `error` while m is the mean (Ville). Every m against which the capital grew that far is refuted.
"""

from dataclasses import dataclass, field
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

MEANS = np.linspace(0, 1, 1001)
LARGEST_BET = 0.75
"""Share of the capital that a bet may lose."""


@dataclass(slots=True)
class MeanBounds:
    """Bounds of the mean of values in [-1, 1], each drawn with that mean given those before it. One pass, any length.

    >>> bounds = MeanBounds(error=0.05)
    >>> for _ in range(40):
    ...     for difference in (1.0, 1.0, 0.0):
    ...         bounds.add(difference)
    >>> bounds.count, bounds.mean > 0.6, 0.4 < bounds.low < bounds.mean < bounds.high
    (120, True, True)
    """

    error: float
    """Probability that the mean is ever outside; half of it on each side."""
    count: int = 0
    low: float = -1.0
    high: float = 1.0
    _sum: float = 0.0
    _deviations: float = 0.0
    _above: NDArray[np.float64] = field(default_factory=lambda: np.zeros_like(MEANS))  # log capital of m too small
    _below: NDArray[np.float64] = field(default_factory=lambda: np.zeros_like(MEANS))  # log capital of m too large

    @property
    def mean(self) -> float:
        """Mean of the values so far; 0 without any."""
        return 2 * self._sum / self.count - 1 if self.count else 0.0

    def add(self, value: float) -> None:
        """Takes the next value. Raises `ValueError` outside [-1, 1] and for nan."""
        if not -1 <= value <= 1:
            raise ValueError(f"value: expected a number in [-1, 1], got {value}")
        share, n = (value + 1) / 2, self.count + 1
        variance = (0.25 + self._deviations) / n  # of the values before this one: a bet must not know what it bets on
        bet = sqrt(2 * log(2 / self.error) / (variance * n * log(1 + n)))
        with np.errstate(divide="ignore"):
            self._above += np.log1p(np.minimum(bet, LARGEST_BET / MEANS) * (share - MEANS))
            self._below += np.log1p(np.minimum(bet, LARGEST_BET / (1 - MEANS)) * (MEANS - share))
        self.count, self._sum = n, self._sum + share
        self._deviations += (share - (0.5 + self._sum) / (n + 1)) ** 2
        refuted = log(2 / self.error)
        small, large = MEANS[self._above >= refuted], MEANS[self._below >= refuted]  # capital is monotone in m
        self.low = max(self.low, 2 * float(small.max()) - 1 if small.size else -1.0)
        self.high = min(self.high, 2 * float(large.min()) - 1 if large.size else 1.0)
