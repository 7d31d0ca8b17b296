"""Advantages from rewards, and training rows from rollouts. Pure.

The baseline averages over rollouts, never over rows. All rows of a rollout carry its advantage.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal, TypeAlias, cast

from shoal.config.training import TrainConfig
from shoal.errors import ConfigError
from shoal.plugins import own_code
from shoal.turn_tree import prompt_ids, trained, trained_rows
from shoal.types import Group, Rollout, Sample

Kind: TypeAlias = Literal["grpo", "grpo_no_std", "rloo", "maxrl"]

Rewards: TypeAlias = Sequence[Sequence[float]]
"""Rewards of each group of a step, one per finished rollout; groups may differ in size."""
PROBE: Rewards = ((0.0, 1.0, 1.0, 0.25), (1.0, 1.0), (0.5,))

STD_EPS = 1e-6


def advantages(rewards: Sequence[float], kind: Kind) -> list[float]:
    """Advantages of a group's n rollouts.

    grpo         (r_i - mean) / (std + 1e-6), std with n - 1 in the denominator (DeepSeekMath, arXiv 2402.03300 §4.1.2)
    grpo_no_std  r_i - mean (Dr.GRPO, arXiv 2503.20783; GLM-5, arXiv 2602.15763)
    rloo         r_i - mean of the others (arXiv 2402.14740)
    maxrl        (r_i - mean) / mean, for rewards of 0 and 1 (arXiv 2602.02710: the mean of the right answers'
                 gradients, less that of all); raises ConfigError for a reward below 0

    Fewer than two rewards, or equal rewards, give advantages of exactly 0.

    >>> advantages([0.0, 1.0, 1.0, 0.0], "grpo_no_std")
    [-0.5, 0.5, 0.5, -0.5]
    >>> advantages([0.0, 3.0, 0.0], "rloo")
    [-1.5, 3.0, -1.5]
    """
    n = len(rewards)
    # The rounded mean of equal numbers may differ from them, and dividing by the std would magnify that.
    if n < 2 or min(rewards) == max(rewards):
        return [0.0] * n
    mean = math.fsum(rewards) / n
    centred = [reward - mean for reward in rewards]
    match kind:
        case "grpo_no_std":
            return centred
        case "rloo":
            return [c * n / (n - 1) for c in centred]
        case "maxrl":
            if min(rewards) < 0:
                raise ConfigError(
                    f"train.advantage: 'maxrl' expected rewards of 0 and 1, got {min(rewards):g}; set "
                    "reward = 'correct' for each task"
                )
            return [c / mean for c in centred]
        case "grpo":
            std = math.sqrt(math.fsum(c * c for c in centred) / (n - 1))
            return [c / (std + STD_EPS) for c in centred]


def batch_advantages(rewards: Sequence[Sequence[float]], kind: str) -> list[list[float]]:
    """Advantages of each rollout of each group of a step.

        batch        (r_i - mean of the batch) / (std of the batch + 1e-6) (REINFORCE++, arXiv 2501.03262)
        group_batch  (r_i - mean of its group) / (std of these over the batch + 1e-6) (its variant with a baseline)
        gae          r_i; the critic turns it into advantages (`critic.py`)
        grpo, grpo_no_std, rloo, maxrl  within each group: see `advantages`
        module:function  the user's own: see `own_advantage`

    Groups may differ in size. Mean and std are over rollouts, not over tokens.

    >>> batch_advantages([[0.0, 2.0], [2.0]], "grpo_no_std")
    [[-1.0, 1.0], [0.0]]
    """
    match kind:
        case "batch":
            scaled = iter(advantages([reward for group in rewards for reward in group], "grpo"))
            return [[next(scaled) for _ in group] for group in rewards]
        case "group_batch":
            centred = [advantages(group, "grpo_no_std") for group in rewards]
            flat = [value for group in centred for value in group]
            if not any(flat):
                return centred
            std = math.sqrt(math.fsum(value * value for value in flat) / (len(flat) - 1))
            return [[value / (std + STD_EPS) for value in group] for group in centred]
        case "gae":
            return [list(group) for group in rewards]
        case "grpo" | "grpo_no_std" | "rloo" | "maxrl":
            return [advantages(group, kind) for group in rewards]
        case _:
            return own_advantage(kind)(rewards)


def turn_returns(rollout: Rollout, discount: float = 1.0, penalty: float = 0.0) -> list[float]:
    """Return of each turn: its own reward and all later ones; the rollout's reward comes with the last turn.

    G_t = sum over k >= t of discount^(k - t) r_k,   r_k = reward of turn k, plus for the last one reward + penalty

    A rollout without turns has one return, its reward.

    >>> from shoal.types import Completion, FinishReason, Reward, Turn
    >>> drawn = Completion((5,), (-1.0,), (0,), FinishReason.STOP)
    >>> turns = (Turn((1,), drawn, 0.25), Turn((2,), drawn, parent=0))
    >>> turn_returns(Rollout("r", (), turns, Reward(1.0)), discount=0.5)
    [0.75, 1.0]
    """
    result, later = [], rollout.reward.value + penalty
    for i, turn in enumerate(reversed(rollout.turns)):
        later = turn.reward + (discount * later if i else later)
        result.append(later)
    return result[::-1] or [later]


def turn_advantages(returns: Sequence[Sequence[Sequence[float]]], kind: str) -> list[list[list[float]]]:
    """Advantages of each turn of each rollout of each group, from the turns' returns.

    Turn t is compared with turn t of the group's other rollouts; a rollout that ended earlier takes part with its last
    turn. So the baseline depends on no sample of the turn itself. With equal returns within each rollout the result
    equals `batch_advantages` of these returns. The critic of `gae` gets the whole rollout's return in every turn.

    >>> turn_advantages([[[0.5, 1.0], [0.0]]], "grpo_no_std")
    [[[0.25, 0.5], [-0.25]]]
    """
    longest = max((len(rollout) for group in returns for rollout in group), default=0)
    columns = [
        batch_advantages([[rollout[min(t, len(rollout) - 1)] for rollout in group] for group in returns], kind)
        for t in range(1 if kind == "gae" else longest)
    ]
    return [
        [[columns[min(t, len(columns) - 1)][g][i] for t in range(len(rollout))] for i, rollout in enumerate(group)]
        for g, group in enumerate(returns)
    ]


def overlong_penalty(tokens: int, max_tokens: int, soft_tokens: int) -> float:
    """Addition to the reward of an answer of `tokens` tokens: falls from 0 to -1 over the last `soft_tokens`.

    Source: soft overlong punishment of DAPO (arXiv 2503.14476 Eq. 13).

    >>> [overlong_penalty(tokens, max_tokens=100, soft_tokens=20) for tokens in (80, 90, 100, 101)]
    [0.0, -0.5, -1.0, -1.0]
    """
    over = tokens - (max_tokens - soft_tokens)
    return -min(1.0, over / soft_tokens) if over > 0 else 0.0


def returns_of(config: TrainConfig, max_tokens: int) -> Callable[[Rollout], list[float]]:
    """Function from a rollout to its turns' returns, as the config says; `max_tokens` is the limit of one answer."""

    def returns(rollout: Rollout) -> list[float]:
        longest = max((len(turn.completion.token_ids) for turn in rollout.turns), default=0)
        penalty = overlong_penalty(longest, max_tokens, config.overlong_tokens) if config.overlong_tokens else 0.0
        return turn_returns(rollout, config.turn_discount, penalty)

    return returns


def is_informative(group: Group, returns: Callable[[Rollout], list[float]] = turn_returns) -> bool:
    """Whether the returns of the group's finished rollouts differ.

    Without a difference the group's gradient is zero, unless rewards are compared across groups or a critic values
    them.

    >>> from shoal.types import Group, Reward, Rollout, Task
    >>> rollouts = tuple(Rollout(id=str(r), messages=(), turns=(), reward=Reward(r)) for r in (0.0, 1.0))
    >>> is_informative(Group(id="g", task=Task("t", "s", ()), rollouts=rollouts, admitted_version=0))
    True
    """
    (values,) = turn_advantages([[returns(rollout) for rollout in group.finished]], "grpo_no_std")
    return any(value for turns in values for value in turns)


def step_samples(groups: Sequence[Group], config: TrainConfig, max_tokens: int) -> list[tuple[Sample, ...]]:
    """Training rows of each of a step's groups, with the config's advantage; `max_tokens` is the limit of one answer.

    Failed rollouts enter neither the baseline nor the rows. A group with one finished rollout or equal rewards still
    gives its rows, with advantage 0; they count in the loss's denominator.

    With `short_groups` "pad" the rows of finished rollouts repeat, in order, up to the group's original size. So every
    group weighs the same (GLM-5, arXiv 2602.15763 §4.1.2). The baseline counts each finished rollout once. The buffer
    drops groups with at most half of the rollouts finished, so they never arrive here.
    """
    returns = returns_of(config, max_tokens)
    values = [[returns(rollout) for rollout in group.finished] for group in groups]
    if not normalised_after_kl(config):
        values = turn_advantages(values, config.advantage)
    result = []
    for group, group_values in zip(groups, values, strict=True):
        finished = list(zip(group.finished, group_values, strict=True))
        if config.short_groups == "pad" and finished:
            finished = [finished[i % len(finished)] for i in range(len(group.rollouts))]
        result.append(tuple(row for rollout, value in finished for row in rows(rollout, value)))
    return result


def normalised_after_kl(config: TrainConfig) -> bool:
    """Whether the trainer, which knows the distance to the reference, computes the advantages of "batch".

    REINFORCE++ (arXiv 2501.03262) normalises the rewards after subtracting the KL penalty.
    """
    return config.advantage == "batch" and config.kl.coefficient > 0 and config.kl.where == "reward"


def rows(rollout: Rollout, advantage: float | Sequence[float]) -> list[Sample]:
    """Token rows of the rollout's turns: every sampled token but the forced ones has mask 1 in exactly one row.

    `advantage` is one number for all turns, or a number for each. A turn extends the row that ends in its parent; the
    tokens between have mask 0. Any other turn opens a new row with its whole prompt. Turns without sampled tokens add
    nothing.

    Raises ValueError for a turn with an empty prompt, because nothing could predict its first token.
    """
    each = [advantage] * len(rollout.turns) if isinstance(advantage, int | float) else advantage
    return [_row(rollout, indices, each) for indices in trained_rows(rollout.turns)]


def _row(rollout: Rollout, indices: Sequence[int], advantages: Sequence[float]) -> Sample:
    """Row of the turns at `indices`, each a continuation of the previous turn."""
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    reinforced: list[float] = []
    could: list[bytes] = []
    before = None
    for index in indices:
        given, sampled = prompt_ids(rollout.turns, index, before), rollout.turns[index].completion
        if not tokens and not given:
            raise ValueError(f"rollout {rollout.id}: expected a prompt of at least one token, got an empty one")
        gap = len(given)
        tokens += (*given, *sampled.token_ids)
        kept = list(map(int, trained(sampled)))
        mask += [0] * gap + kept
        logprobs += [0.0] * gap + [logp if m else 0.0 for m, logp in zip(kept, sampled.logprobs, strict=True)]
        versions += [-1] * gap + [version if m else -1 for m, version in zip(kept, sampled.versions, strict=True)]
        reinforced += [0.0] * gap + [advantages[index] if m else 0.0 for m in kept]
        could += [b""] * gap + list(sampled.kept or [b""] * len(kept))
        before = index
    routing = rollout.turns[indices[-1]].completion.routing
    streams = tuple(tokens), tuple(mask), tuple(logprobs), tuple(versions), tuple(reinforced)
    return Sample(*streams, routing, tuple(could) if any(could) else ())


def mask_tokens(rows: Iterable[Sample], oldest_version: int) -> tuple[tuple[Sample, ...], int]:
    """Removes tokens sampled before `oldest_version` from the gradient; returns the rows and the number of such tokens.

    Their advantage becomes 0 and their mask stays 1, so the loss's denominator still counts the tokens before any
    filter.
    """
    result, late_tokens = [], 0
    for row in rows:
        late = [bool(m) and version < oldest_version for m, version in zip(row.mask, row.versions, strict=True)]
        kept = (0.0 if is_late else a for is_late, a in zip(late, row.advantages, strict=True))
        result.append(replace(row, advantages=tuple(kept)) if any(late) else row)
        late_tokens += sum(late)
    return tuple(result), late_tokens


@cache
def own_advantage(name: str) -> Callable[[Rewards], list[list[float]]]:
    """User's function from the rewards of each group to an advantage for each rollout, checked at every call.

    Raises `ConfigError` for a function that cannot be imported or fails on a small example.
    """
    function = cast(Callable[[Rewards], object], own_code("train.advantage", name))

    def checked(rewards: Rewards) -> list[list[float]]:
        try:
            given = function([list(group) for group in rewards])
            result = [[float(value) for value in group] for group in cast(Rewards, given)]
        except Exception as error:  # the user's function may raise anything
            raise ConfigError(f"train.advantage: {name!r} failed: {type(error).__name__}: {error}") from error
        if [len(group) for group in result] != [len(group) for group in rewards]:
            raise ConfigError(
                f"train.advantage: {name!r}: expected one number for each of {[len(g) for g in rewards]} rewards, "
                f"got {[len(group) for group in result]}"
            )
        if not all(math.isfinite(value) for group in result for value in group):
            raise ConfigError(f"train.advantage: {name!r}: expected finite numbers, got {result}")
        return result

    checked(PROBE)
    return checked
