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
EFFECTS = np.linspace(-1, 1, 401)
STAKES = np.array([[0.05], [0.1], [0.2], [0.4], [0.6]])
"""Shares of the capital that the gamblers of `EffectBounds` may lose in a bet."""


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


@dataclass(slots=True)
class EffectBounds:
    """Bounds of an effect: the mean outcome in [0, 1] of what a coin gave the new kind, less that of the others.

    An outcome y, whose coin showed the new kind with `chance` p, has the value (y - c) (is_new - p) / (p (1 - p)). Its
    mean is the effect (Horvitz and Thompson, 1952), for any c that was known before. c is the mean outcome so far,
    which keeps the values small. Gamblers with the stakes `STAKES` and equal parts of the capital bet against each
    effect.

    >>> bounds = EffectBounds(error=0.05)
    >>> for _ in range(40):
    ...     for is_new, outcome in ((True, 1.0), (False, 0.0), (True, 1.0), (False, 1.0)):
    ...         bounds.add(is_new, 0.5, outcome)
    >>> 0.1 < bounds.low < 0.5 < bounds.high
    True
    """

    error: float
    """Probability that the effect is ever outside; half of it on each side."""
    low: float = -1.0
    high: float = 1.0
    _count: int = 1
    _sum: float = 0.5
    _above: NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(STAKES), len(EFFECTS))))  # log capital
    _below: NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(STAKES), len(EFFECTS))))

    def add(self, is_new: bool, chance: float, outcome: float) -> None:
        """Takes the next outcome. Raises `ValueError` for numbers outside [0, 1], chances of 0 and 1, and nan."""
        if not (0 <= outcome <= 1 and 0 < chance < 1):
            raise ValueError(f"expected an outcome in [0, 1] of a chance in (0, 1), got {outcome} and {chance}")
        usual = self._sum / self._count
        value = (outcome - usual) * (is_new - chance) / (chance * (1 - chance))
        least = -max(usual / chance, (1 - usual) / (1 - chance))  # of all values that could have come
        most = max((1 - usual) / chance, usual / (1 - chance))
        self._above += np.log1p(STAKES * (value - EFFECTS) / np.maximum(EFFECTS - least, 1e-9))
        self._below += np.log1p(STAKES * (EFFECTS - value) / np.maximum(most - EFFECTS, 1e-9))
        self._count, self._sum = self._count + 1, self._sum + outcome
        refuted = log(2 * len(STAKES) / self.error)
        small = EFFECTS[np.logaddexp.reduce(self._above) >= refuted]  # capital is monotone in the effect
        large = EFFECTS[np.logaddexp.reduce(self._below) >= refuted]
        self.low, self.high = max([self.low, *small[-1:].tolist()]), min([self.high, *large[:1].tolist()])
