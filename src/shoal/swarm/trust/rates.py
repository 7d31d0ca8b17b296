"""Token buckets, and a table of the keys that were set last. Pure: the clock comes in as an argument."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

MOST_RATED = 4096
"""Names whose rates are remembered."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Bucket:
    """A token bucket: `rate_per_s` on average, `burst` at once."""

    rate_per_s: float
    burst: float
    used: float = 0.0
    """Amount to be filled up again; more than `burst` after `spend`."""
    filled_s: float = 0.0

    def take(self, now_s: float, amount: float = 1.0) -> bool:
        """Takes an amount if it is there, and returns whether it was. A clock that goes back fills nothing."""
        self.used = max(0.0, self.used - max(0.0, now_s - self.filled_s) * self.rate_per_s)
        self.filled_s = max(self.filled_s, now_s)
        if self.used + amount > self.burst:
            return False
        self.used += amount
        return True

    def spend(self, amount: float) -> None:
        """Adds an amount that was already used, above the burst if need be."""
        self.used += amount


class Recent(OrderedDict[K, V]):
    """Table of the `most` keys that were set last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


class Buckets:
    """Token buckets by name. Invariant: no name has its bucket full again sooner than its rate fills it.

    At `MOST_RATED` names, the least recent one is forgotten if its bucket is full; else new names share one bucket.
    """

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s, self._burst = rate_per_s, burst
        self._of: OrderedDict[str, Bucket] = OrderedDict()
        self._others = Bucket(rate_per_s, burst)

    def take(self, name: str, now_s: float, amount: float = 1.0) -> bool:
        """Takes an amount from the bucket of a name if it is there, and returns whether it was."""
        if name not in self._of:
            if len(self._of) >= MOST_RATED:
                oldest, bucket = next(iter(self._of.items()))
                bucket.take(now_s, 0.0)
                if bucket.used:
                    return self._others.take(now_s, amount)
                del self._of[oldest]
            self._of[name] = Bucket(self._rate_per_s, self._burst)
        self._of.move_to_end(name)
        return self._of[name].take(now_s, amount)
