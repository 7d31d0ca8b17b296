"""The log as one row per rollout, in JSON lines or Parquet.

    group_id, rollout_id   ids; those of rollouts are unique within a group
    task, receipt          name of the task service; from where the task can be drawn again, or null
    answer                 the truth of the task, or null
    messages               role, content, reasoning, tool_calls and tool_call_id of each
    tokens mask logprobs versions   streams of one length. Mask 1 is a sampled token; the others carry 0.0 and -1
    advantages             the same for advantages, 0.0 where mask is 0; null where it is not known, see `Extras`
    texts                  the text of each token; null without the run's tokenizer
    reward                 null where the scorer did not answer
    parts, evidence        the reward's parts by name, and what the scorer says for it
    turn_rewards           of each turn, in addition to the reward
    turn_parents           of each turn, the index of the turn that it continues; null where it begins anew
    peer                   id of the peer that sampled it; null for the run's own
    status, reason         of the rollout: "finished", or "failed" and why. A finished rollout whose group was not
                           trained on carries the group's reason, such as "stale"
    finished_seq           order of commit of the group
    admitted_version consumed_version consumed_step   the last two null where never consumed

A turn whose parent is the turn before continues the same stream, so that each token is there once. Any other turn (an
edited or compacted history, another branch) is appended with its whole prompt.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from shoal import wire
from shoal.errors import RunDirError, WireError
from shoal.experience.log import BODY_BYTES, snapshot
from shoal.experience.raw import RawGroup, RawRollout, RawTurn, decode_rollout, read_groups
from shoal.files import replaced
from shoal.turn_tree import prompt_ids
from shoal.types import RewardStatus, Task, check_parents

ROWS_PER_SHARD = 1024
"""Number of rollouts per row group of a Parquet file, which are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Columns that the log alone does not give, as functions of its rows."""

    advantages: Callable[[RawGroup], Sequence[list[float] | None] | None] = lambda group: None
    """Advantages of a consumed group's sampled tokens, rollout by rollout; None when unknown."""
    text: Callable[[int], str] | None = None
    """The text of one token."""


NONE = Extras()


@dataclass(frozen=True, slots=True)
class _Exported:
    """One rollout with the sources of its row."""

    group: RawGroup
    task: Task
    rollout: RawRollout
    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    advantages: list[float] | None
    texts: list[str] | None

    @property
    def reward(self) -> float | None:
        """The reward; None where the scorer did not answer."""
        return self.rollout.reward.value if self.rollout.reward.status == RewardStatus.SCORED else None

    @property
    def parts(self) -> list[dict[str, object]]:
        """The reward's parts by name."""
        return [{"name": name, "value": value} for name, value in self.rollout.reward.parts]


def _struct(**fields: pa.DataType) -> pa.DataType:
    return pa.struct(list(fields.items()))


_TEXT, _NUMBER, _IDS, _FLOATS = pa.string(), pa.int64(), pa.list_(pa.int32()), pa.list_(pa.float32())
_RECEIPT = _struct(dataset=_TEXT, dataset_version=_TEXT, config=_TEXT, seed=_NUMBER, index=_NUMBER)
_CALL = _struct(id=_TEXT, name=_TEXT, arguments=_TEXT)
_MESSAGE = _struct(role=_TEXT, content=_TEXT, tool_calls=pa.list_(_CALL), tool_call_id=_TEXT, reasoning=_TEXT)
_COLUMNS: dict[str, tuple[pa.DataType, Callable[[_Exported], object]]] = {
    "group_id": (_TEXT, lambda one: one.group.id),
    "rollout_id": (_TEXT, lambda one: one.rollout.id),
    "task": (_TEXT, lambda one: one.task.service),
    "receipt": (_RECEIPT, lambda one: one.task.receipt),
    "answer": (_TEXT, lambda one: one.task.answer),
    "messages": (pa.list_(_MESSAGE), lambda one: one.rollout.messages),
    "tokens": (_IDS, lambda one: one.tokens),
    "mask": (pa.list_(pa.int8()), lambda one: one.mask),
    "logprobs": (_FLOATS, lambda one: one.logprobs),
    "versions": (_IDS, lambda one: one.versions),
    "advantages": (_FLOATS, lambda one: one.advantages),
    "texts": (pa.list_(_TEXT), lambda one: one.texts),
    "reward": (pa.float64(), lambda one: one.reward),
    "parts": (pa.list_(_struct(name=_TEXT, value=pa.float64())), lambda one: one.parts),
    "evidence": (_TEXT, lambda one: one.rollout.reward.evidence),
    "turn_rewards": (pa.list_(pa.float64()), lambda one: [turn.reward for turn in one.rollout.turns]),
    "turn_parents": (_IDS, lambda one: [turn.parent for turn in one.rollout.turns]),
    "peer": (_TEXT, lambda one: one.group.peer_id),
    "status": (_TEXT, lambda one: one.rollout.status),
    "reason": (_TEXT, lambda one: one.rollout.reason or one.group.ended_reason or ""),
    "finished_seq": (_NUMBER, lambda one: one.group.finished_seq),
    "admitted_version": (_NUMBER, lambda one: one.group.admitted_version),
    "consumed_version": (_NUMBER, lambda one: one.group.version),
    "consumed_step": (_NUMBER, lambda one: one.group.step),
}
_PARQUET = pa.schema([(name, kind) for name, (kind, _) in _COLUMNS.items()])
ExportRow: TypeAlias = dict[str, object]
"""Values of one rollout by the names of the module's head."""


def export_jsonl(run_dir: Path, file: Path, extras: Extras = NONE) -> int:
    """Writes every committed rollout as a line of JSON and returns their number. Raises `RunDirError`."""
    encoder = msgspec.json.Encoder()
    rows = 0
    with written_to(file) as out:
        for row in export_rows(run_dir, extras):
            out.write(encoder.encode(row) + b"\n")
            rows += 1
    return rows


def export_parquet(run_dir: Path, file: Path, extras: Extras = NONE) -> int:
    """Writes every committed rollout as a row of a Parquet file and returns their number. Raises `RunDirError`."""
    count = 0
    with written_to(file) as out, pq.ParquetWriter(out, _PARQUET) as writer:
        rows = export_rows(run_dir, extras)
        while shard := list(islice(rows, ROWS_PER_SHARD)):
            writer.write_table(pa.Table.from_pylist(msgspec.to_builtins(shard), schema=_PARQUET))
            count += len(shard)
    return count


def export_rows(run_dir: Path, extras: Extras = NONE) -> Iterator[ExportRow]:
    """Every committed rollout in the order of commit. Raises `RunDirError`, `WireError` for a damaged record."""
    with snapshot(run_dir) as connection:
        for group in read_groups(connection):
            task = wire.decode(group.task, Task, BODY_BYTES)
            advantages = extras.advantages(group) or [None] * len(group.bodies)
            for body, values in zip(group.bodies, advantages, strict=True):
                rollout = decode_rollout(body)
                tokens, mask, logprobs, versions = streams(rollout.turns)
                sampled = iter(values or ())
                spread = None if values is None else [next(sampled, 0.0) if one else 0.0 for one in mask]
                texts = [extras.text(token) for token in tokens] if extras.text else None
                row = _Exported(group, task, rollout, tokens, mask, logprobs, versions, spread, texts)
                yield {name: value(row) for name, (_, value) in _COLUMNS.items()}


def streams(turns: Sequence[RawTurn]) -> tuple[list[int], list[int], list[float], list[int]]:
    """Tokens, mask, logprobs and versions of a rollout, [L] each unless a turn's own streams differ in length.

    Raises `WireError` for a turn whose parent is not an earlier turn.
    """
    try:
        check_parents(turn.parent for turn in turns)
    except ValueError as error:
        raise WireError(str(error)) from error
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for index, turn in enumerate(turns):
        goes_on = turn.parent is not None and turn.parent == index - 1
        given = turn.rendered_ids if goes_on else prompt_ids(turns, index)
        drawn = turn.completion
        tokens += [*given, *drawn.token_ids]
        mask += [0] * len(given) + [1] * len(drawn.token_ids)
        logprobs += [*[0.0] * len(given), *drawn.logprobs]
        versions += [*[-1] * len(given), *drawn.versions]
    return tokens, mask, logprobs, versions


@contextmanager
def written_to(file: Path) -> Iterator[IO[bytes]]:
    """Opens a file that appears whole or not at all; pipes and devices are written to directly."""
    direct = file.exists() and not file.is_file()
    try:
        with nullcontext(file) if direct else replaced(file) as target, target.open("wb") as out:
            yield out
    except OSError as error:
        raise RunDirError(f"{file} cannot be written: {error.strerror}") from error
