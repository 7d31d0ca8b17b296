"""A finished run of any size, made in seconds: one real step, copied within its log."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec

from benchmarks.growth import META, ROLLOUTS, group, stepped
from shoal import wire
from shoal.config import parse, to_toml
from shoal.experience.buffer import Buffer
from shoal.experience.log import FILE

KINDS = 64
"""Different groups, which the run repeats."""
_COPIES = """
WITH RECURSIVE copies(seq) AS (SELECT {first} UNION ALL SELECT seq + 1 FROM copies WHERE seq < {last})
"""


def write_run(run_dir: Path, rollouts: int) -> int:
    """Writes the directory of a finished run of about so many rollouts; returns how many they are."""
    asyncio.run(_first_step(run_dir))
    per_step = META.groups_per_step
    last = max(per_step, rollouts // ROLLOUTS // per_step * per_step)
    copies = _COPIES.format(first=per_step + 1, last=last)
    kinds = [group(f"kind-{kind}", kind) for kind in range(KINDS)]
    with closing(sqlite3.connect(run_dir / FILE)) as log, log:
        log.execute("CREATE TEMP TABLE kinds(kind INTEGER PRIMARY KEY, task BLOB)")
        log.execute("CREATE TEMP TABLE answers(kind INTEGER, position INTEGER, body BLOB, PRIMARY KEY(kind, position))")
        log.executemany("INSERT INTO kinds VALUES (?, ?)", [(k, wire.encode(one.task)) for k, one in enumerate(kinds)])
        bodies = [(k, at, wire.encode(body)) for k, one in enumerate(kinds) for at, body in enumerate(one.rollouts)]
        log.executemany("INSERT INTO answers VALUES (?, ?, ?)", bodies)
        step = f"(seq - 1) / {per_step}"
        for statement in (
            f"INSERT INTO started(started_seq, group_id, service, admitted_version, after_step) {copies} "
            f"SELECT seq, 'copy-' || seq, 'chain_sum', {step}, {step} - 1 FROM copies",
            f"INSERT INTO groups(finished_seq, group_id, task, admitted_version, after_step) {copies} "
            f"SELECT seq, 'copy-' || seq, task, {step}, {step} - 1 FROM copies JOIN kinds ON kind = seq % {KINDS}",
            f"INSERT INTO rollouts {copies} "
            f"SELECT seq, position, body FROM copies JOIN answers ON kind = seq % {KINDS}",
            f"INSERT INTO consumed(finished_seq, step, position, horizon, trained_from, masked_tokens) {copies} "
            f"SELECT seq, {step}, (seq - 1) % {per_step}, seq, {step}, 0 FROM copies",
            f"INSERT OR IGNORE INTO steps {copies} SELECT DISTINCT {step}, {step}, {step} + 1 FROM copies",
        ):
            log.execute(statement)
    _write_records(run_dir, last // per_step)
    return last * ROLLOUTS


async def _first_step(run_dir: Path) -> None:
    buffer = Buffer.open(run_dir, META, max_running=64)
    await stepped(buffer, 0)
    await buffer.close()
    (run_dir / "resolved.toml").write_text(to_toml(parse({"run_dir": str(run_dir), "tasks": [{"name": "chain_sum"}]})))


def _write_records(run_dir: Path, steps: int) -> None:
    encode = msgspec.json.Encoder().encode
    with (run_dir / "metrics.jsonl").open("wb") as file:
        for step in range(1, steps + 1):
            values = {"reward": step % 7 / 7, "tokens_per_s": 100.0, "engine_busy": 0.9, "trainer_busy": 0.5}
            waits = {"groups_wait_s": 0.5, "train_s": 0.4, "write_s": 0.1, "save_s": 0.0}
            file.write(encode({"kind": "step", "time_s": step, "step": step, **values, **waits}) + b"\n")
            if step % max(1, steps // 20) == 0:
                scores = {"sampled": step / steps, "sampled_reward": step / steps}
                file.write(encode({"kind": "eval", "time_s": step, "step": step, **scores}) + b"\n")
