"""Limits on the cost of one question or answer of a peer."""

from dataclasses import dataclass

SCORE_S = 1.0
"""Processor time of one score of a peer's answer; eight answers usually take 20 ms."""


@dataclass(frozen=True, slots=True)
class QuestionLimits:
    """Limits of drawing a peer's question again, or of playing its conversation."""

    draw_s: float = 5.0
    """Seconds of one draw, or of one call of a conversation; reasoning-gym's slowest draws take under 3 s."""
    characters: int = 8000
    """Most characters of question and truth together, for draws with a peer's settings."""


USUAL = QuestionLimits()
