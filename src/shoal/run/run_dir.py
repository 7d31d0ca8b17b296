"""Files of a run directory: its configuration at each start, and what is lost with the newest steps of a log."""

import json
from collections.abc import Callable
from contextlib import closing
from math import ceil
from pathlib import Path
from typing import TypeAlias

from shoal.config import CREDENTIALS, Config, load, to_toml
from shoal.config.training import OwnLoss
from shoal.errors import ConfigError, LogBehind, RunDirError
from shoal.experience.buffer import Buffer
from shoal.experience.schema import RunMeta
from shoal.files import replaced
from shoal.observe.metrics import JsonlTracker, Record, number, records_in
from shoal.plugins import source_hash

QUEUED_GROUPS = 1.25  # times the groups that fill the engine: it must never wait for the next
STEP_KINDS = ("step", "eval", "answer")
"""Kinds of records whose `step` is a number of the log's steps."""

Listener: TypeAlias = Callable[[Record], None]


def own_mathematics(config: Config) -> dict[str, str]:
    """Names of the user's own loss and advantage, by setting."""
    loss, advantage = config.train.loss, config.train.advantage
    own = {"train.loss": loss.function if isinstance(loss, OwnLoss) else "", "train.advantage": advantage}
    return {setting: name for setting, name in own.items() if ":" in name}


def run_meta(config: Config) -> RunMeta:
    """Part of a configuration that the log keeps."""
    return RunMeta(
        max_staleness=config.asynchrony.max_staleness,
        late=config.asynchrony.late,
        groups_per_step=config.train.groups_per_step,
        push_every=config.train.push_every,
        own_code=" ".join(f"{name}@{source_hash(field, name)}" for field, name in own_mathematics(config).items()),
    )


def open_buffer(run_dir: Path, meta: RunMeta, *, max_running: int, resume: bool) -> Buffer:
    """Opens the buffer of a run directory. Raises `RunDirError`; a log behind its checkpoint is an event too."""
    try:
        return Buffer.open(run_dir, meta, max_running=max_running, resume=resume)
    except LogBehind as error:
        with closing(JsonlTracker(run_dir / "metrics.jsonl")) as metrics:
            metrics.write("event", {"name": "log_behind_checkpoint", "reason": str(error)})
        raise


def forget_lost_steps(run_dir: Path, steps: int) -> int:
    """Removes the metrics, held-out answers and token files of steps after the log's; returns how many steps.

    The log of a run may lack its newest steps after a loss of power, or when an older copy took its place.
    Raises `RunDirError`.
    """
    path, newest = run_dir / "metrics.jsonl", steps
    try:
        for folder in ("held_out", "tokens"):
            for file in (run_dir / folder).glob("[0-9]*"):
                if int(file.name.partition(".")[0]) > steps:
                    file.unlink()
        kept = []
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            at = [int(number(record, "step", 0)) for record in records_in(line) if record["kind"] in STEP_KINDS]
            newest = max([newest, *at])
            kept += [] if at and at[0] > steps else [line]
        if newest > steps:
            with replaced(path, private=True) as unfinished:
                unfinished.write_bytes(b"".join(kept))
    except OSError as error:
        raise RunDirError(f"{run_dir} cannot be written: {error}") from error
    return newest - steps


def groups_at_once(config: Config) -> int:
    """Groups that fill the engine, and a few more."""
    sequences = config.engine.max_running * (len(config.engine.urls) or config.engine.count or 1)
    return max(ceil(QUEUED_GROUPS * sequences / config.rollout.group_size), 1)


def changed_settings(config: Config, run_dir: Path) -> list[str]:
    """Settings that differ from the run's last start: each may, but the run then trains under two configurations."""
    try:
        before, now = load(run_dir / "resolved.toml").model_dump(), config.model_dump()
    except ConfigError:
        return []
    sections = [name for name in now if isinstance(now[name], dict)]
    changed = [f"{name}.{key}" for name in sections for key in now[name] if before[name].get(key) != now[name][key]]
    return changed + [name for name in now if name not in sections and before[name] != now[name]]


def write_resolved(config: Config, run_dir: Path) -> None:
    """Writes the resolved configuration, and credentials to a separate file. Raises `RunDirError`."""
    hidden: dict[str, str] = {}
    text = to_toml(config, hidden)
    try:
        if not hidden:
            (run_dir / CREDENTIALS).unlink(missing_ok=True)
        files = {CREDENTIALS: json.dumps(hidden), "resolved.toml": text}
        for name in files if hidden else ["resolved.toml"]:
            with replaced(run_dir / name, private=True) as unfinished:
                unfinished.write_text(files[name], encoding="utf-8")
    except OSError as error:
        raise RunDirError(f"{run_dir} cannot be written: {error.strerror}") from error
