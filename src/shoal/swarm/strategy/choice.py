"""A strategy chooses the own groups to share, the offers to take, and how the latter are reinforced. Pure.

Randomness comes in as an argument.

SAPO (arXiv 2509.08721) shares all groups and takes uniformly among groups with an advantage: `all` and `uniform`.
Uniform gives a thousand made-up names a thousand shares. The default is therefore `trusted`, in which newcomers have
one small share together. A user's `module:function` has the signature `Sharer` or `Taker`.

    share   all           every group
            informative   groups whose rewards differ
            budget:N      informative groups that fit into N bytes per second on average
    take    uniform       uniformly among groups whose rewards differ
            trusted       informative groups, author by author, by trust, age and use; newcomers at most 15 %
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import fmean
from typing import Any, TypeAlias, TypeVar, cast

from shoal.config import Credit
from shoal.errors import ConfigError, expected_one_of
from shoal.plugins import own_code
from shoal.swarm.trust.rates import Bucket
from shoal.types import Sample

T = TypeVar("T")
NEWCOMER_SHARE = 0.15
"""Share of the groups taken by `trusted` that newcomers may have, in the long run."""
HALF_LIFE_S = 300.0
"""Seconds in which the worth of an offer halves, for `trusted`."""
LIKELY = 0.5
"""Probability from which on a peer's token weighs fully under `group_likely`: a minority's token below it shrinks."""
BUDGET_BURST_S = 60.0


@dataclass(frozen=True, slots=True)
class Own:
    """A group of this node that may be shared."""

    service: str
    rewards: tuple[float, ...]
    size_bytes: int
    """Bytes of its offer, before compression."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A verified offer that may be taken, with this node's own rewards."""

    peer_id: str
    service: str
    rewards: tuple[float, ...]
    age_s: float
    uses: int
    """Times that this offer was taken before."""
    author_uses: int
    """Groups of its author that were taken before."""
    trust: float  # 0..1
    newcomer: bool


Sharer: TypeAlias = Callable[[Own, float], bool]
"""(group, time in s) -> whether to share the group."""
Taker: TypeAlias = Callable[[Sequence[Candidate], int, random.Random], Sequence[int]]
"""(candidates, most to take, randomness) -> indices of the taken candidates."""


def differ(rewards: Sequence[float]) -> bool:
    """Tells whether a group has an advantage other than 0.

    >>> differ([0.0, 1.0]), differ([1.0, 1.0]), differ([1.0])
    (True, False, False)
    """
    return len(rewards) >= 2 and min(rewards) != max(rewards)


def all_groups(own: Own, now_s: float) -> bool:
    """Shares every group, as SAPO does."""
    return True


def informative_groups(own: Own, now_s: float) -> bool:
    """Shares groups whose rewards differ."""
    return differ(own.rewards)


def budget(bytes_per_s: float) -> Sharer:
    """Makes a sharer of informative groups within an average of bytes per second."""
    bucket = Bucket(bytes_per_s, bytes_per_s * BUDGET_BURST_S)
    return lambda own, now_s: differ(own.rewards) and bucket.take(now_s, own.size_bytes)


def uniform(candidates: Sequence[Candidate], n: int, rng: random.Random) -> list[int]:
    """Takes uniformly among groups with an advantage, as SAPO does."""
    found = _informative(candidates)
    return rng.sample(found, min(n, len(found)))


def by_trust(candidates: Sequence[Candidate], n: int, rng: random.Random) -> list[int]:
    """Takes one offer of each author before the second of any, so many offers of one author gain it nothing.

    Authors are drawn with a probability proportional to

        trust * best / (1 + groups taken of the author)

    and the author's offer with one proportional to its worth; `best` is the largest worth among the author's offers:

        (1 - p^L - (1-p)^L) * 2^(-age / half-life) / (1 + uses)

    p is the mean reward, clamped to 0..1, and L the group's size. The first factor is the chance that such a group is
    informative.
    """
    offers: dict[str, list[int]] = {}
    for i in _informative(candidates):
        offers.setdefault(candidates[i].peer_id, []).append(i)
    queues = [_drawn(of_author, [_worth(candidates[i]) for i in of_author], rng) for of_author in offers.values()]
    weights = []
    for of_author in offers.values():
        one = candidates[of_author[0]]
        best = max(_worth(candidates[i]) for i in of_author)
        weights.append(one.trust * best / (1 + one.author_uses))
    order = _drawn(queues, weights, rng)
    turns = zip_longest(*order)
    return [i for turn in turns for i in turn if i is not None][:n]


def _worth(one: Candidate) -> float:
    size = len(one.rewards)
    p = min(max(fmean(one.rewards), 0.0), 1.0)
    return max(1 - p**size - (1 - p) ** size, 1e-3) * 2 ** (-one.age_s / HALF_LIFE_S) / (1 + one.uses)


def _drawn(items: Sequence[T], weights: Sequence[float], rng: random.Random) -> list[T]:
    """All items in the order of a weighted draw without replacement, by u^(1/w) (Efraimidis and Spirakis 2006)."""
    keys = [math.log(1 - rng.random()) / max(weight, 1e-300) for weight in weights]
    return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__, reverse=True)]


class Trusted:
    """Takes `by_trust` and keeps the newcomers below their share, however many there are.

    Each wanted group adds `NEWCOMER_SHARE` to the newcomers' credit. The credit holds at most one group more than a
    step's share, so silence saves nothing up for a flood. Groups withheld from newcomers go to established authors.
    """

    def __init__(self) -> None:
        self._credit = 1.0

    def __call__(self, candidates: Sequence[Candidate], n: int, rng: random.Random) -> list[int]:
        """Takes up to `n`: newcomers within their credit, established authors for the rest."""
        kept = self._within(candidates, by_trust(candidates, n, rng), n)
        rest = [i for i, candidate in enumerate(candidates) if not candidate.newcomer and i not in kept]
        return kept + [rest[j] for j in by_trust([candidates[i] for i in rest], n - len(kept), rng)]

    def _within(self, candidates: Sequence[Candidate], chosen: Sequence[int], wanted: int) -> list[int]:
        self._credit = min(self._credit, 1.0) + NEWCOMER_SHARE * wanted
        kept = []
        for i in chosen:
            if candidates[i].newcomer:
                if self._credit < 1:
                    continue
                self._credit -= 1
            kept.append(i)
        return kept


SHARERS: Mapping[str, Sharer] = {
    "all": all_groups,
    "informative": informative_groups,
}


TAKERS = ("uniform", "trusted")


def external_rows(rows: Sequence[Sample], credit: Credit) -> tuple[Sample, ...]:
    """Rows of an external group: `group` keeps them as they are (SAPO).

    `group_likely` sets negative advantages to 0. The gradient of a worse external answer pushes down text that this
    node might never write. With stacked models, leaving such answers out was better in each of three seeds
    (experiments/sapo_stacked). The tokens of a row without advantage still count in the loss's denominator. It also
    weighs each token by min(1, p / LIKELY), where p is its probability under the node's own weights. With equal
    weights, a phrase that only some peers' right answers carry spreads to their part of the rows.
    """
    if credit == "group":
        return tuple(rows)
    return tuple(
        replace(
            row,
            advantages=tuple(
                max(a, 0.0) * min(1.0, math.exp(logprob) / LIKELY)
                for a, logprob in zip(row.advantages, row.logprobs, strict=True)
            ),
        )
        for row in rows
    )


def sharer_of(name: str) -> Sharer:
    """Resolves a sharer by name, `budget:N` or `module:function`. Raises `ConfigError`."""
    if name in SHARERS:
        return SHARERS[name]
    kind, _, amount = name.partition(":")
    if kind == "budget":
        if not amount.isdecimal() or int(amount) < 1:
            raise ConfigError(f"swarm.share: expected budget:N with N bytes per second, got {name!r}")
        return budget(int(amount))
    return cast(Sharer, own_function("swarm.share", name, [*SHARERS, "budget:N"]))


def taker_of(name: str) -> Taker:
    """Resolves a taker by name or `module:function`. Raises `ConfigError`."""
    if name == "uniform":
        return uniform
    if name == "trusted":
        return Trusted()
    return cast(Taker, own_function("swarm.take", name, TAKERS))


def apply_taker(taker: Taker, candidates: Sequence[Candidate], n: int, rng: random.Random) -> list[int]:
    """Applies a taker and checks its result: up to `n` candidates, each at most once."""
    return list(dict.fromkeys(i for i in taker(candidates, n, rng) if 0 <= i < len(candidates)))[:n]


def own_function(field: str, name: str, known: Sequence[str]) -> Any:
    """Imports the function `module:function`. Raises `ConfigError`, which lists the built-in names."""
    if ":" not in name:
        raise ConfigError(f"{field}: {expected_one_of(known, name, ' or module:function')}")
    found = own_code(field, name)
    if not callable(found):
        raise ConfigError(f"{field}: expected a function, {name!r} is {type(found).__name__}")
    return found


def _informative(candidates: Sequence[Candidate]) -> list[int]:
    return [i for i, candidate in enumerate(candidates) if differ(candidate.rewards)]
