"""Hooks change a group's rewards and rollouts between the scorer and the log.

`tasks.N.reward` names the hooks, in order. They are of training only; evaluation sees what the scorer says.

    "score"            the scorer's value as it is
    "correct"          1 for a full score and 0 for anything less (in `rewards.marks`: evaluation sees that too)
    "length:0.001"     less so much for each token that the rollout sampled
    "dedup"            of rollouts that say the same, the first one stays
    "module:function"  your own: `f(group) -> group`

What a group was worth before stays in `Reward.parts`, under "before post-processing".
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias, cast

from shoal.errors import ConfigError, expected_one_of
from shoal.plugins import described, in_thread, own_code
from shoal.types import Group, RewardStatus, Role, Rollout, RolloutStatus

Hook: TypeAlias = Callable[[Group], Group]
DUPLICATE = "post-processing: another rollout of the group has the same text"
HOOKS = ("score", "correct", "length:NUMBER", "dedup")
BEFORE = "before post-processing"


def hooks_of(name: str, words: str | Sequence[str]) -> list[Hook]:
    """The hooks that a task's `reward` names. Raises `ConfigError`.

    >>> hooks_of("sums", "correct"), len(hooks_of("sums", ["correct", "length:0.01", "dedup"]))
    ([], 2)
    """
    hooks: list[Hook] = []
    field = f"tasks.{name}.reward"
    for word in [words] if isinstance(words, str) else words:
        if word in ("score", "correct"):
            continue
        kind, _, parameter = word.partition(":")
        if kind == "dedup" and not parameter:
            hooks.append(without_duplicates)
        elif kind == "length":
            try:
                hooks.append(partial(shorter_is_better, per_token=float(parameter)))
            except ValueError:
                raise ConfigError(f"{field}: expected a number after 'length:', got {word!r}") from None
        elif parameter:
            own = own_code(field, word)
            if not callable(own):
                raise ConfigError(f"{field}: expected a function of a group, got {word!r}")
            hooks.append(cast(Hook, own))
        else:
            raise ConfigError(f"{field}: {expected_one_of(HOOKS, word, ' or module:function')}")
    return hooks


async def processed(group: Group, hooks: Sequence[Hook]) -> Group:
    """The group after all hooks, each called in a thread.

    A hook that raises leaves it without usable rollouts, with the reason.
    """
    for hook in hooks:
        try:
            changed: object = await in_thread(hook, group)
            if not isinstance(changed, Group):
                raise TypeError(f"expected the group from the hook, got {changed!r:.80}")
        except Exception as error:  # a hook is user code: its failure is a status
            reason = f"post-processing: {described(error)}"
            return replace(group, rollouts=tuple(_failed(rollout, reason) for rollout in group.rollouts))
        group = changed
    return group


def shorter_is_better(group: Group, per_token: float) -> Group:
    """Subtracts `per_token` from the reward for each token that a rollout sampled."""

    def shortened(rollout: Rollout) -> Rollout:
        reward = rollout.reward
        if reward.status is not RewardStatus.SCORED or rollout.status is RolloutStatus.FAILED:
            return rollout
        value, parts = reward.value - per_token * rollout.sampled_tokens, (*reward.parts, (BEFORE, reward.value))
        return replace(rollout, reward=replace(reward, value=value, parts=parts))

    return replace(group, rollouts=tuple(map(shortened, group.rollouts)))


def without_duplicates(group: Group) -> Group:
    """Trains only the first of several rollouts in which the assistant says equal texts."""
    seen: set[tuple[str, ...]] = set()
    kept = []
    for rollout in group.rollouts:
        said = tuple(message.content for message in rollout.messages if message.role is Role.ASSISTANT)
        again = rollout.status is not RolloutStatus.FAILED and said in seen
        kept.append(_failed(rollout, DUPLICATE) if again else rollout)
        seen.add(said)
    return replace(group, rollouts=tuple(kept))


def _failed(rollout: Rollout, reason: str) -> Rollout:
    already = rollout.status is RolloutStatus.FAILED
    return rollout if already else replace(rollout, status=RolloutStatus.FAILED, reason=reason)
