"""Files with the numbers of each trained token: a run keeps those of its newest steps, and pages read them.

tokens/000020.safetensors belongs to the twentieth step; `trainer.token_numbers` defines its content. With several ranks
the others write 000020.1.safetensors, and so on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shoal.experience.raw import RawGroup, decode_rollout
from shoal.trainer.messages import CAPPED, CLIPPED, MASKED, TokensFile
from shoal.turn_tree import trained, trained_rows
from shoal.types import RolloutStatus

FOLDER, SUFFIX = "tokens", ".safetensors"
MOST_FILES = 1000
"""Most files: limits those of small steps, which `MOST_MB` would not."""
MOST_MB = 256
"""Megabytes of all files: a million tokens of four numbers take 16."""


class TokensFiles:
    """Files of a run's newest steps.

    Invariant: after `prune` there are at most `MOST_FILES` of at most `most_mb` megabytes in all, or only one step's.
    """

    def __init__(self, run_dir: Path, most_mb: int = MOST_MB) -> None:
        self._folder, self._most_bytes = run_dir / FOLDER, most_mb * 1_000_000
        found = sorted(self._folder.glob(f"*{SUFFIX}")) if most_mb else []
        self._sizes = {file: file.stat().st_size for file in found}  # oldest first
        self._newest = ""

    def wanted(self, step: int, group_ids: Sequence[str]) -> TokensFile | None:
        """Describes the file of a step; None when none are kept."""
        if not self._most_bytes:
            return None
        self._newest = f"{step:06}"
        return TokensFile(str(self._folder / f"{self._newest}{SUFFIX}"), tuple(group_ids))

    def prune(self) -> None:
        """Counts the newest step's files, and removes the oldest files beyond the limit."""
        for file in self._written():
            self._sizes.pop(file, None)
            self._sizes[file] = file.stat().st_size
        size = sum(self._sizes.values())
        for file in list(self._sizes):
            fits = size <= self._most_bytes and len(self._sizes) <= MOST_FILES
            if fits or file.name.startswith(self._newest):
                break
            file.unlink(missing_ok=True)
            size -= self._sizes.pop(file)

    def _written(self) -> list[Path]:
        """Files of the newest step. Only a step of several ranks lists the folder, which holds many files."""
        if not self._newest:
            return []
        if (self._folder / f"{self._newest}.1{SUFFIX}").exists():
            return sorted(self._folder.glob(f"{self._newest}.*"))
        return [file for file in [self._folder / f"{self._newest}{SUFFIX}"] if file.exists()]


@dataclass(frozen=True, slots=True)
class TrainedToken:
    """Numbers of one token in the training step that consumed it."""

    logp: float
    """Nats, under the weights that were trained, at the time."""
    entropy: float
    advantage: float
    weight: float
    """Weight of the token's loss in its update."""
    gradient: float
    """Minus the derivative of the update's loss by `logp`: above 0 the token became more likely."""
    fate: str
    """`clipped`, `masked`, `capped`, or empty."""


def trained_tokens(run_dir: Path, group: RawGroup, position: int) -> list[TrainedToken | None] | None:
    """Numbers of the sampled tokens of one rollout, turn after turn; None when they are not kept.

    None marks a forced token and a token of a row without any advantage, which was not computed.

    Raises `WireError`.
    """
    rollouts = [decode_rollout(body) for body in group.bodies]
    if group.step is None or rollouts[position].status is RolloutStatus.FAILED:
        return None
    first = sum(len(trained_rows(one.turns)) for one in rollouts[:position] if one.status is not RolloutStatus.FAILED)
    turns = rollouts[position].turns
    rows = trained_rows(turns)
    found = _rows(run_dir, group.step + 1, group.id, range(first, first + len(rows)))
    if found is None:
        return None
    by_turn: list[list[TrainedToken | None]] = [[None] * len(turn.completion.token_ids) for turn in turns]
    for indices, numbers in zip(rows, found, strict=True):
        of_row = iter(numbers or ())
        for i in indices:
            by_turn[i] = [next(of_row, None) if is_trained else None for is_trained in trained(turns[i].completion)]
    return [token for tokens in by_turn for token in tokens]


def _rows(run_dir: Path, step: int, group_id: str, wanted: range) -> list[list[TrainedToken] | None] | None:
    """Numbers of some rows of a group; None for a row that was not computed and for a step whose files were pruned."""
    found: dict[int, list[TrainedToken]] = {}
    first = None
    for path in sorted((run_dir / FOLDER).glob(f"{step:06}.*{SUFFIX[1:]}")):
        try:
            with safe_open(path, framework="numpy") as file:
                first = _first_row(json.loads(file.metadata()["groups"]), group_id)
                streams = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, ValueError):
            continue  # pruned meanwhile or incomplete
        if streams:  # none of a rank that computed no row
            found |= _of_rows(streams, range(first + wanted.start, first + wanted.stop))
    return None if first is None else [found.get(first + row) for row in wanted]


def _first_row(groups: list[tuple[str, int]], group_id: str) -> int:
    """Index of a group's first row in its step. Raises `KeyError`."""
    first = 0
    for one, rows in groups:
        if one == group_id:
            return first
        first += rows
    raise KeyError(group_id)


def _of_rows(streams: dict[str, Any], wanted: range) -> dict[int, list[TrainedToken]]:
    ends = streams["count_R"].cumsum()
    found = {}
    for at, row in enumerate(streams["row_R"].tolist()):
        if row in wanted:
            part = slice(int(ends[at] - streams["count_R"][at]), int(ends[at]))
            names = ("logp_N", "entropy_N", "advantage_N", "gradient_N", "fate_N")
            weight = float(streams["weight_R"][at])
            found[row] = [
                TrainedToken(logp, entropy, advantage, weight, gradient, _fate(bits))
                for logp, entropy, advantage, gradient, bits in zip(
                    *(streams[name][part].tolist() for name in names), strict=True
                )
            ]
    return found


def _fate(bits: int) -> str:
    named = ((CLIPPED, "clipped"), (MASKED, "masked"), (CAPPED, "capped"))
    return " and ".join(name for bit, name in named if bits & bit)
