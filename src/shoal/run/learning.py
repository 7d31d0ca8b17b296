"""Learning warns during a run and at its end that the run cannot learn. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.trainer.advantage import is_informative
from shoal.types import Group, Role, Rollout

STEPS = 20
"""Uninformative steps in a row after which the warning is given, and again after each as many."""
SHOWN, SHOWN_CHARACTERS = 3, 80


@dataclass(slots=True)
class Learning:
    """Counter of consecutive steps whose rewards compare nothing, so that their gradient is zero."""

    returns: Callable[[Rollout], list[float]]
    within_groups: bool
    """True if rewards are compared within each group, rather than over the step."""
    steps: int = 0
    """Steps of this process."""
    useless: int = 0
    """Uninformative steps in a row, up to now."""
    shown: str = ""

    def stepped(self, groups: Sequence[Group]) -> bool:
        """Counts one trained step; returns True when `warning` is due."""
        self.steps += 1
        if self._teaches(groups):
            self.useless = 0
            return False
        self.useless += 1
        self.shown = _shown(groups)
        return self.useless % STEPS == 0

    @property
    def warning(self) -> str:
        """Warning that the last steps taught nothing; empty otherwise."""
        if not self.useless or self.useless < min(STEPS, self.steps):
            return ""
        return f"no group of the last {self.useless} steps had differing rewards, so they taught nothing; {self.shown}"

    def _teaches(self, groups: Sequence[Group]) -> bool:
        if self.within_groups:
            return any(is_informative(group, self.returns) for group in groups)
        returns = [self.returns(rollout) for group in groups for rollout in group.finished]
        return any(one != returns[0] for one in returns)


def _shown(groups: Sequence[Group]) -> str:
    """Quotes some answers with their rewards, which mostly show the cause."""
    rollouts = [rollout for group in groups for rollout in group.finished]
    chosen = rollouts[:: max(1, len(rollouts) // SHOWN)][:SHOWN]
    return "some answers: " + ", ".join(f"{_last_answer(one)} (reward {one.reward.value:g})" for one in chosen)


def _last_answer(rollout: Rollout) -> str:
    """Quotes a rollout's last answer, cut off at the end."""
    answer = next((one.content for one in reversed(rollout.messages) if one.role is Role.ASSISTANT), "")
    return repr(answer if len(answer) <= SHOWN_CHARACTERS else f"{answer[:SHOWN_CHARACTERS]}...")
