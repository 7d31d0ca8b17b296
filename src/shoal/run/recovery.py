"""Recovery continues an ended run: the log is the truth, and a checkpoint saves repeated computation."""

import asyncio
from contextlib import closing
from pathlib import Path

from shoal.errors import LogBehind
from shoal.experience import checkpoint
from shoal.experience.buffer import Buffer
from shoal.experience.schema import RunMeta
from shoal.observe.metrics import JsonlTracker
from shoal.run.loop import LoopDeps, TrainLoop


def open_buffer(run_dir: Path, meta: RunMeta, *, max_running: int, resume: bool) -> Buffer:
    """Opens the buffer of a run directory. Raises `RunDirError`; a log behind its checkpoint is an event too."""
    try:
        return Buffer.open(run_dir, meta, max_running=max_running, resume=resume)
    except LogBehind as error:
        with closing(JsonlTracker(run_dir / "metrics.jsonl")) as metrics:
            metrics.write("event", {"name": "log_behind_checkpoint", "reason": str(error)})
        raise


async def recover(parts: LoopDeps, loop: TrainLoop) -> None:
    """Brings the trainer to the log's end: the newest intact checkpoint, then every recorded step after it."""
    recovered = parts.buffer.recovered

    damages: list[str] = []
    saved = await asyncio.to_thread(checkpoint.intact, parts.run_dir, damages.append)
    for damage in damages:
        parts.trackers.log_event("checkpoint_damaged", reason=damage)
    if saved is not None:
        await parts.trainer.load(saved.path)
    await asyncio.to_thread(parts.store.keep_only, recovered.version)  # a resume needs no more disk than a run
    for record in await parts.buffer.steps_after(saved.step if saved else -1):
        await loop.replay(record)
    if recovered.version > 0:
        await loop.serve_recovered(recovered.version)
        parts.trackers.log_event(
            "resumed",
            step=loop.first_step,
            waiting=float(recovered.waiting),
            interrupted=float(recovered.interrupted),
        )
