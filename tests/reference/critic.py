"""Generalised advantage estimation and the clipped value loss as their papers define them, one token at a time."""

from collections.abc import Sequence


def advantage(rewards: Sequence[float], values: Sequence[float], t: int, gae_lambda: float) -> float:
    """arXiv 1506.02438 Eq. 16 with gamma = 1, of one row: the sum over l of lambda^l delta_{t+l}."""
    after = [*values[1:], 0.0]
    return sum(gae_lambda**k * (rewards[t + k] + after[t + k] - values[t + k]) for k in range(len(rewards) - t))


def value_loss(value: float, before: float, wanted: float, clip: float) -> tuple[float, float]:
    """Half the larger of (V - R)^2 and (V_clipped - R)^2, and its derivative by V."""
    clipped = before + max(-clip, min(clip, value - before))
    free, held = (value - wanted) ** 2, (clipped - wanted) ** 2
    inside = abs(value - before) < clip
    return max(free, held) / 2, (value - wanted) if free >= held or inside else 0.0
