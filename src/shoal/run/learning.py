"""Says of a run that it cannot learn, while it runs and at its end. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.trainer.advantage import is_informative
from shoal.types import Group, Role, Rollout

STEPS = 20
"""In a row without anything to learn from, after which it is said, and again after as many more."""
SHOWN, SHOWN_CHARACTERS = 3, 80


@dataclass(slots=True)
class Learning:
    """Counts the steps in a row whose rewards compare nothing, so that their gradient is zero."""

    returns: Callable[[Rollout], list[float]]
    within_groups: bool
    """Whether rewards are compared within each group, rather than over the step."""
    steps: int = 0
    """Of this process."""
    useless: int = 0
    """The last ones in a row."""
    shown: str = ""

    def stepped(self, groups: Sequence[Group]) -> bool:
        """Takes one trained step in; whether `warning` should be told now."""
        self.steps += 1
        if self._teaches(groups):
            self.useless = 0
            return False
        self.useless += 1
        self.shown = _shown(groups)
        return self.useless % STEPS == 0

    @property
    def warning(self) -> str:
        """A sentence when the last steps of the run taught nothing; empty otherwise."""
        if not self.useless or self.useless < min(STEPS, self.steps):
            return ""
        return f"no group of the last {self.useless} steps had differing rewards, so they taught nothing; {self.shown}"

    def _teaches(self, groups: Sequence[Group]) -> bool:
        if self.within_groups:
            return any(is_informative(group, self.returns) for group in groups)
        returns = [self.returns(rollout) for group in groups for rollout in group.finished]
        return any(one != returns[0] for one in returns)


def _shown(groups: Sequence[Group]) -> str:
    """Some answers and what they were worth: the cause is mostly to be seen in them."""
    rollouts = [rollout for group in groups for rollout in group.finished]
    chosen = rollouts[:: max(1, len(rollouts) // SHOWN)][:SHOWN]
    return "some answers: " + ", ".join(f"{_said(one)} (reward {one.reward.value:g})" for one in chosen)


def _said(rollout: Rollout) -> str:
    """Its last answer, quoted, the end cut off."""
    said = next((one.content for one in reversed(rollout.messages) if one.role is Role.ASSISTANT), "")
    return repr(said if len(said) <= SHOWN_CHARACTERS else f"{said[:SHOWN_CHARACTERS]}...")
