"""Signs that a run learns nothing, or forgets, each with the setting to change."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, stdev

from shoal.reward.service import FULL
from shoal.trainer.advantage import is_informative
from shoal.types import FinishReason, Group, Role, Rollout, RolloutStatus

UNINFORMATIVE = "uninformative"
"""Reason of a group that dynamic sampling drops."""
STEPS = 20
"""Uninformative steps in a row after which the warning is given; steps whose mean rewards are compared."""
SHOWN, SHOWN_CHARACTERS = 3, 80
MOSTLY = 0.5
KEPT = 0.5
"""Share of the best reward, above the lowest one, below which the reward has collapsed."""
SURE = 5.0
"""Standard errors above which a fall is significant."""


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
        """Counts one trained step; returns True when `warning` is due, once for each row of such steps."""
        self.steps += 1
        if teaches(groups, self.returns, self.within_groups):
            self.useless = 0
            return False
        self.useless += 1
        self.shown = f"{remedy(groups)}; {_shown(groups)}"
        return self.useless == STEPS

    @property
    def warning(self) -> str:
        """Warning that the last steps taught nothing; empty otherwise."""
        if not self.useless or self.useless < min(STEPS, self.steps):
            return ""
        return f"no group of the last {self.useless} steps had differing rewards, so they taught nothing; {self.shown}"


def teaches(groups: Sequence[Group], returns: Callable[[Rollout], list[float]], within_groups: bool) -> bool:
    """Whether any returns differ that are compared: those within a group, or all of them."""
    if within_groups:
        return any(is_informative(group, returns) for group in groups)
    each = [returns(rollout) for group in groups for rollout in group.finished]
    return any(one != each[0] for one in each)


def remedy(groups: Sequence[Group]) -> str:
    """Advice to make rewards differ, from the rewards and answers of groups with equal ones."""
    rollouts = [rollout for group in groups for rollout in group.finished]
    if not any(group.usable for group in groups):
        reasons = Counter(
            one.reason for group in groups for one in group.rollouts if one.status is RolloutStatus.FAILED
        )
        return f"too many rollouts fail, mostly for this reason: {reasons.most_common(1)[0][0]}"
    if (share := fmean(one.reward.value >= FULL for one in rollouts)) > MOSTLY:
        return f"{share:.0%} of the answers are right: set tasks.params to harder questions"
    if cut := cut_remedy(rollouts):
        return cut
    reasons = Counter(one.reward.unread for one in rollouts if one.reward.unread)
    if (share := reasons.total() / len(rollouts)) > MOSTLY:
        return (
            f"{share:.0%} of the answers have not the form that the scorer reads ({reasons.most_common(1)[0][0]}): "
            "name the form in tasks.system_prompt, or set another tasks.scorer"
        )
    if len(rollouts) > len(groups) and all(distinct_answers(group) == 1 for group in groups):
        return "the answers of each group are all equal: set rollout.temperature higher, or easier tasks.params"
    return (
        "set tasks.params to easier questions, tasks.system_prompt to the form that the scorer reads, or a scorer "
        "with marks in between"
    )


def cut_remedy(rollouts: Sequence[Rollout]) -> str:
    """Advice where most answers are cut; empty otherwise."""
    share = fmean(map(was_cut, rollouts))
    return f"{share:.0%} of the answers are cut at their end: set rollout.max_tokens higher" if share > MOSTLY else ""


def distinct_answers(group: Group) -> int:
    """Number of different last answers of a group's finished rollouts."""
    return len({_answer(rollout) for rollout in group.finished})


def _shown(groups: Sequence[Group]) -> str:
    """Quotes some answers with their rewards, which mostly show the cause."""
    rollouts = [rollout for group in groups for rollout in group.finished]
    chosen = rollouts[:: max(1, len(rollouts) // SHOWN)][:SHOWN]
    return "some answers: " + ", ".join(f"{_last_answer(one)} (reward {one.reward.value:g})" for one in chosen)


def _last_answer(rollout: Rollout) -> str:
    """Quotes a rollout's last answer, cut off at the end."""
    answer = _answer(rollout)
    return repr(answer if len(answer) <= SHOWN_CHARACTERS else f"{answer[:SHOWN_CHARACTERS]}...")


def _answer(rollout: Rollout) -> str:
    return next((one.content for one in reversed(rollout.messages) if one.role is Role.ASSISTANT), "")


@dataclass(slots=True)
class Collapse:
    """Watcher of the mean reward: reports once when the reward falls far below the run's best. Pure."""

    lr: float
    rewards: list[float] = field(default_factory=list)
    reported: bool = False
    _best: float = float("-inf")
    _best_step: int = 0
    _lowest: float = 0.0

    def stepped(self, reward: float) -> str:
        """Takes the mean reward of a step. Returns the warning where it is due, else an empty text."""
        self.rewards.append(reward)
        self._lowest = min(self._lowest, reward)
        recent = self.rewards[-STEPS:]
        if len(recent) < STEPS or self.reported:
            return ""
        mean = fmean(recent)
        if mean >= self._best:
            self._best, self._best_step = mean, len(self.rewards)
        if mean - self._lowest >= KEPT * (self._best - self._lowest):
            return ""
        error = stdev(self.rewards) * sqrt(2 / STEPS)  # of the difference of two such means
        if self._best - mean <= SURE * error:
            return ""
        self.reported = True
        return (
            f"the reward fell from {self._best:.3g} up to step {self._best_step} to {mean:.3g} in the last {STEPS} "
            f"steps; set train.lr below {self.lr:g}, or train.kl.coefficient above 0, and begin anew"
        )


def was_cut(rollout: Rollout) -> bool:
    """Whether the last answer used up its tokens."""
    return bool(rollout.turns) and rollout.turns[-1].completion.finish_reason is FinishReason.LENGTH
