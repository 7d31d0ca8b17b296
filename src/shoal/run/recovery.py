"""Recovery brings a policy to where an ended run stopped: the log is the truth, a checkpoint saves computation."""

import asyncio
from pathlib import Path

from shoal.experience import checkpoint
from shoal.experience.schema import StepRecord
from shoal.observe.metrics import Trackers
from shoal.run.policy import Policy


async def recover(policy: Policy, run_dir: Path, trackers: Trackers) -> None:
    """Loads the newest intact checkpoint and repeats every recorded step after it; engines get the newest Version."""
    recovered, damages = policy.buffer.recovered, list[str]()
    saved = await asyncio.to_thread(checkpoint.intact, run_dir, damages.append)
    for damage in damages:
        trackers.log_event("checkpoint_damaged", reason=damage)
    if saved is not None:
        await policy.trainer.load(saved.path)
    await policy.versions.keep_only(recovered.version)
    for record in await policy.buffer.steps_after(saved.step if saved else -1):
        await _replay(policy, record)
    if recovered.version > 0:
        await policy.versions.recover(recovered.version)
        counts = {"waiting": float(recovered.waiting), "interrupted": float(recovered.interrupted)}
        trackers.log_event("resumed", step=recovered.first_step, **counts)


async def _replay(policy: Policy, record: StepRecord) -> None:
    """Repeats a step that the checkpoint lacks, on the same groups, with a new Version if it had one.

    Only the weights that engines will load are written: each Version in turn would fill the disk.
    """
    rows = await policy.rows(await policy.buffer.groups_of(record.step), record.version)
    await policy.train(rows, record.version, since_push=record.step % policy.config.train.push_every)
    if record.version_after == record.version:
        return
    if record.version_after == policy.buffer.recovered.version:
        await policy.versions.write(record.version_after)
    else:
        await policy.trainer.write_version(None)
