"""Automatic ratios: each task's share follows the lessons of its latest groups. Pure.

A group teaches when its rewards differ; otherwise all of its advantages are 0. A mastered or hopeless task gives few
such groups, and a slow task gives few groups at all. Both shrink towards the floor, and the others grow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Bounds: TypeAlias = tuple[float, float]
"""The smallest and the largest weight, as factors of the user's weight."""
BOUNDS: Bounds = (0.1, 4.0)


@dataclass(frozen=True, slots=True)
class Change:
    """A changed weight, with its reason."""

    name: str
    before: float
    after: float
    reason: str


@dataclass(slots=True)
class _Lately:
    """Numbers of one task since its rate was last taken."""

    finished: int = 0
    informative: int = 0
    wanted: float = 0.0
    """Number of groups by which its quota grew."""
    looks: int = 0
    holding: int = 0
    """Number of checks at which this task was at its concurrency limit although the gate and its quota had room."""

    @property
    def informative_rate(self) -> float:
        """The share of informative groups, shrunk a little towards one half: 0 of 3 is not never."""
        return (self.informative + 0.5) / (self.finished + 1)

    @property
    def holds_up(self) -> bool:
        """True if the others mostly waited for this task, which could not go faster."""
        return self.holding > 0.5 * self.looks

    @property
    def reason(self) -> str:
        """The observations, in words."""
        slow = "; the others waited for it although it ran as many at once as it may" if self.holds_up else ""
        return f"{self.informative} of {self.finished} groups informative{slow}"


ENOUGH = 16
"""Number of finished or wanted groups below which a task's rate says nothing."""
STEP = 0.5
"""Share of the way to the new weight that is gone at once: rates of few groups are noisy."""
WORTH_TELLING = 0.02
"""Relative change below which a weight stays."""
SLOWER, FASTER = 0.5, 1.25
"""Factors of a task's pace: after it held up the others, and after it did not, up to 1."""


MEMORY = 32
"""Number of groups after which a task's tokens per group are half forgotten."""


class Adjuster:
    """Follows the groups of each task, and sets new weights after every so many groups.

    The new weights are the user's by a rate of each task: the share of its informative groups, or, without bounds, the
    inverse of the tokens that one group takes. The latter keeps each task's share of the sampled *tokens* at what the
    user gave.
    """

    def __init__(self, base: Mapping[str, float], bounds: Bounds | None) -> None:
        """`base` are the user's weights."""
        self._base = dict(base)
        self._bounds = bounds
        self._lately = {name: _Lately() for name in base}
        self._rates: dict[str, float] = {}
        self._tokens: dict[str, float] = {}
        self._pace = dict.fromkeys(base, 1.0)
        self._since = 0
        self.weights = dict(base)

    @property
    def due(self) -> bool:
        """True if enough groups finished since the last adjustment; for token shares, of every task."""
        known = self._bounds is not None or self._tokens.keys() == self._base.keys()
        return known and self._since >= ENOUGH * len(self._base) / 2

    def finished(self, name: str, *, informative: bool, tokens: int) -> None:
        """Notes a usable group of a task, with its number of sampled tokens."""
        self._since += 1
        self._lately[name].finished += 1
        self._lately[name].informative += informative
        before = self._tokens.get(name, float(max(tokens, 1)))
        self._tokens[name] = before + (tokens - before) * (1 - 0.5 ** (1 / MEMORY))

    def looked(self, name: str, *, holding: bool) -> None:
        """Notes whether others wait for a task whose quota has room, because the task is at its concurrency limit."""
        self._lately[name].looks += 1
        self._lately[name].holding += holding

    def adjust(self, growth: Mapping[str, float]) -> list[Change]:
        """Moves the weights; `growth` is what each task's quota grew by since the last time. Each change has a reason.

        The target is `base * rate / mean rate`. With bounds the rate is the share of informative groups times a pace
        that sinks while the others wait for the task; the target is clamped to `base * low .. base * high`, and a task
        with too few groups keeps the rate it had.
        """
        self._since = 0
        reasons = self._lessons(growth) if self._bounds else self._lengths()
        base = sum(self._base[name] for name in self._rates)
        mean = sum(self._base[name] * rate for name, rate in self._rates.items()) / max(base, 1e-9)
        changes = [self._moved(name, self._rates[name] / mean, reason) for name, reason in reasons.items()]
        return [change for change in changes if abs(change.after - change.before) > WORTH_TELLING * change.before]

    def _lengths(self) -> dict[str, str]:
        """Takes the rates of tokens per group; returns the reasons."""
        self._rates = {name: 1 / max(tokens, 1.0) for name, tokens in self._tokens.items()}
        return {name: f"{tokens:.0f} tokens per group" for name, tokens in self._tokens.items()}

    def _lessons(self, growth: Mapping[str, float]) -> dict[str, str]:
        """Takes the rates of the tasks with enough groups; returns the reasons."""
        reasons = {}
        for name, wanted in growth.items():
            lately = self._lately[name]
            lately.wanted += wanted
            if max(lately.finished, lately.wanted) >= ENOUGH:
                self._pace[name] = min(1.0, self._pace[name] * (SLOWER if lately.holds_up else FASTER))
                self._rates[name] = lately.informative_rate * self._pace[name]
                reasons[name] = lately.reason
                self._lately[name] = _Lately()
        return reasons

    def _moved(self, name: str, factor: float, reason: str) -> Change:
        before = self.weights[name]
        if self._bounds is None:
            self.weights[name] = self._base[name] * factor
        else:
            target = self._base[name] * min(max(factor, self._bounds[0]), self._bounds[1])
            self.weights[name] = before + STEP * (target - before)
        return Change(name, before, self.weights[name], reason)
