"""What a long run keeps: memory, files and time per step of the experience log over many tiny steps, without a model.

    python -m benchmarks.growth 20000

Each step admits, commits, takes and consumes two groups of two answers of 64 tokens and records a Version; every 25th
saves a tiny checkpoint, and steps are archived as `log.keep_steps` would have them. A line per twentieth of the run:

    step_ms    wall time of a step, mean over the twentieth
    cpu_ms     time of the processor in it
    rss_mb     memory of the process
    log_mb     log.sqlite and its -wal
    files, fds files in the run directory, open descriptors of the process

The last line is JSON: `flat` compares the last quarter of the run with the second one, which comes after everything
was loaded once; `audit_ok` and `audit_s` are of the whole run read back, archive included.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import psutil

from shoal.experience import checkpoint
from shoal.experience.audit import audit
from shoal.experience.buffer import Buffer
from shoal.experience.schema import RunMeta
from shoal.types import Completion, FinishReason, Group, Message, Reward, Role, Rollout, Task, Turn

META = RunMeta(max_staleness=1, late="drop", groups_per_step=2, push_every=1)
TOKENS, ROLLOUTS, CHECKPOINT_EVERY, KEEP_STEPS, PARTS = 64, 2, 25, 200, 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the run at one moment."""

    step: int
    step_ms: float
    cpu_ms: float
    rss_mb: float
    log_mb: float
    archive_mb: float
    files: int
    fds: int


def group(name: str, version: int) -> Group:
    """Builds a group of tiny rollouts."""
    drawn = Completion(tuple(range(TOKENS)), (-0.25,) * TOKENS, (version,) * TOKENS, FinishReason.STOP)
    messages = (Message(Role.USER, "1 + 1 ="),)
    rollouts = tuple(
        Rollout(f"{name}#{i}", messages, (Turn((1, 2, 3), drawn),), Reward(float(i))) for i in range(ROLLOUTS)
    )
    return Group(name, Task(name, "chain_sum", messages, answer="2"), rollouts, version)


async def stepped(buffer: Buffer, step: int) -> None:
    """Runs one step."""
    for place in range(META.groups_per_step):
        name = f"g{step}-{place}"
        await buffer.add(group(name, await buffer.admit(name, "chain_sum")))
    taken = await buffer.take(META.groups_per_step, step)
    await buffer.consumed(step, step, [one.id for one in taken], version_after=step + 1)
    await buffer.record_version(step + 1, f"{step:032x}")
    buffer.on_loaded(step + 1)


async def saved(buffer: Buffer, run_dir: Path, step: int) -> int:
    """Saves a checkpoint; returns the step of the oldest kept checkpoint."""
    (checkpoint.begin(run_dir, step) / "weights").write_bytes(b"w" * 1000)
    await buffer.sync()
    checkpoint.seal(run_dir, step)
    return checkpoint.checkpoints(run_dir)[0].step


def measured(run_dir: Path, step: int, step_s: float, cpu_s: float) -> Sizes:
    """Measures the present sizes."""
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    process = psutil.Process()
    log_bytes = sum(path.stat().st_size for path in files if path.name.startswith("log.sqlite"))
    archive_bytes = sum(path.stat().st_size for path in files if path.suffix == ".parquet")
    rss = process.memory_info().rss
    return Sizes(
        step,
        step_s * 1e3,
        cpu_s * 1e3,
        rss / 1e6,
        log_bytes / 1e6,
        archive_bytes / 1e6,
        len(files),
        len(os.listdir("/proc/self/fd")),
    )


async def grown(run_dir: Path, steps: int) -> list[Sizes]:
    """Runs all steps; returns the sizes over the run."""
    buffer = Buffer.open(run_dir, META, max_running=8)
    sizes, archived, began_s, cpu_s = [], -1, time.perf_counter(), time.process_time()
    part = max(1, steps // PARTS)
    for step in range(steps):
        await stepped(buffer, step)
        if step % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
            through = min(step - KEEP_STEPS, await saved(buffer, run_dir, step))
            if through - archived >= KEEP_STEPS:
                await buffer.archive(through)
                archived = through
        if step % part == part - 1:
            wall = (time.perf_counter() - began_s) / part
            sizes.append(measured(run_dir, step + 1, wall, (time.process_time() - cpu_s) / part))
            print("  ".join(f"{name} {value:,.6g}" for name, value in asdict(sizes[-1]).items()), flush=True)
            began_s, cpu_s = time.perf_counter(), time.process_time()
    await buffer.close()
    return sizes


def ratio(sizes: list[Sizes], name: str) -> float:
    """Mean of the last quarter over the mean of the second quarter."""
    values = [float(getattr(one, name)) for one in sizes]
    quarter = max(1, len(values) // 4)
    return round(fmean(values[-quarter:]) / fmean(values[quarter : 2 * quarter]), 3)


def main(steps: int) -> None:
    """Runs, reads back, and prints."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        sizes = asyncio.run(grown(run_dir, steps))
        began_s = time.perf_counter()
        report = audit(run_dir)
        result = {
            "steps": steps,
            **asdict(sizes[-1]),
            "flat": {name: ratio(sizes, name) for name in ("step_ms", "cpu_ms", "rss_mb", "log_mb", "fds")},
            "audit_ok": report.ok and report.steps == steps,
            "audit_s": round(time.perf_counter() - began_s, 1),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]))
