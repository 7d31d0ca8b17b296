"""Advantage of the user's own, imported by name and checked before it is used."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias, cast

from shoal.errors import ConfigError
from shoal.plugins import own_code

Rewards: TypeAlias = Sequence[Sequence[float]]
"""Rewards of each group of a step, one per finished rollout; groups may differ in size."""
PROBE: Rewards = ((0.0, 1.0, 1.0, 0.25), (1.0, 1.0), (0.5,))


@cache
def own_advantage(name: str) -> Callable[[Rewards], list[list[float]]]:
    """User's function from the rewards of each group to an advantage for each rollout, checked at every call.

    Raises `ConfigError` for a function that cannot be imported or fails on a small example.
    """
    function = cast(Callable[[Rewards], object], own_code("train.advantage", name))

    def advantages(rewards: Rewards) -> list[list[float]]:
        try:
            given = function([list(group) for group in rewards])
            result = [[float(value) for value in group] for group in cast(Rewards, given)]
        except Exception as error:  # the user's function raises what it will
            raise ConfigError(f"train.advantage: {name!r} failed: {type(error).__name__}: {error}") from error
        if [len(group) for group in result] != [len(group) for group in rewards]:
            raise ConfigError(
                f"train.advantage: {name!r}: expected one number for each of {[len(g) for g in rewards]} rewards, "
                f"got {[len(group) for group in result]}"
            )
        if not all(math.isfinite(value) for group in result for value in group):
            raise ConfigError(f"train.advantage: {name!r}: expected finite numbers, got {result}")
        return result

    advantages(PROBE)
    return advantages
