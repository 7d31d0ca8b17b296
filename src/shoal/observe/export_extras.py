"""Extras of `shoal export`: the advantages of training and the text of each token."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from shoal import wire
from shoal.config import Config, load
from shoal.errors import ConfigError, WireError
from shoal.experience.export import Extras
from shoal.experience.log import BODY_BYTES, snapshot
from shoal.experience.raw import RawGroup, read_groups
from shoal.model.renderer_loading import found_directory
from shoal.trainer.advantage import Kind, returns_of, turn_advantages
from shoal.types import Rollout, RolloutStatus

WITHIN_GROUPS: tuple[Kind, ...] = ("grpo", "grpo_no_std", "rloo")
ANCHOR = "a"
TEXTS_KEPT = 1 << 16


def extras_of(run_dir: Path, *, reads_log: bool = True) -> Extras:
    """Computes the extras of a run from its resolved.toml; a run without this file has none.

    Advantages follow the settings of the run's last start. They are unknown for external groups, which `swarm.credit`
    weighs, and with `train.advantage = "gae"`, where the critic makes them. Without `reads_log` they are known only
    where a group's own rewards give them, so that no other group is read.
    """
    try:
        config = load(run_dir / "resolved.toml")
    except ConfigError:
        return Extras()
    folders = (run_dir / "model", found_directory(config.model.path))
    file = next((one for folder in folders if folder and (one := folder / "tokenizer.json").is_file()), None)
    text = None if file is None else token_text(Tokenizer.from_file(str(file)))
    within = config.train.advantage in WITHIN_GROUPS
    known = config.train.advantage != "gae" and (within or reads_log)
    return Extras(_Advantages(config, run_dir), text) if known else Extras(text=text)


def token_text(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Builds the function from a token to its text in an answer: some tokenizers drop a leading space."""
    anchor = tokenizer.encode(ANCHOR, add_special_tokens=False).ids
    before = tokenizer.decode(anchor, skip_special_tokens=False)

    @lru_cache(TEXTS_KEPT)
    def text(token: int) -> str:
        return tokenizer.decode([*anchor, token], skip_special_tokens=False).removeprefix(before)

    return text


class _Advantages:
    """Recomputes `trainer.advantage.step_samples` for the rows of a group."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config, self._kind = config, config.train.advantage
        self._returns = returns_of(config.train, config.rollout.max_tokens)
        # Other groups of the step are needed only if the advantage compares groups.
        self._known = {} if self._kind in WITHIN_GROUPS else self._of_steps(run_dir)

    def __call__(self, group: RawGroup) -> list[list[float] | None] | None:
        """Advantages of each rollout's sampled tokens; None for failed rollouts."""
        rollouts = _rollouts(group)
        if not rollouts or group.version is None or group.peer_id is not None:
            return None
        of_turns = iter(self._known.get(group.id) or turn_advantages([self._of_finished(rollouts)], self._kind)[0])
        oldest = self._config.asynchrony.staleness.masked_below(group.version)
        return [
            None if one.status is RolloutStatus.FAILED else _of_tokens(one, next(of_turns), oldest) for one in rollouts
        ]

    def _of_finished(self, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """Returns by turn of the finished rollouts."""
        return [self._returns(one) for one in rollouts if one.status is not RolloutStatus.FAILED]

    def _of_steps(self, run_dir: Path) -> Mapping[str, list[list[float]]]:
        """Advantages by turn of all finished rollouts of every consumed group, by group id."""
        steps: dict[int, dict[str, list[list[float]]]] = defaultdict(dict)
        with snapshot(run_dir) as connection:
            for group in read_groups(connection):
                if group.step is not None:
                    steps[group.step][group.id] = self._of_finished(_rollouts(group))
        return {
            group_id: values
            for step in steps.values()
            for group_id, values in zip(step, turn_advantages(list(step.values()), self._kind), strict=True)
        }


def _rollouts(group: RawGroup) -> list[Rollout]:
    """Readable rollouts of a group; an unreadable rollout has no advantage."""
    try:
        return [wire.decode(body, Rollout, BODY_BYTES) for body in group.bodies]
    except WireError:
        return []


def _of_tokens(rollout: Rollout, turns: list[float], oldest_version: int) -> list[float]:
    return [
        value if version >= oldest_version else 0.0
        for turn, value in zip(rollout.turns, turns, strict=False)  # without turns there still is a return
        for version in turn.completion.versions
    ]
