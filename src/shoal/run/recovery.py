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
        if not await _replay(policy, record):
            trackers.log_event("replay_not_exact", step=record.step + 1)
    if recovered.version > 0:
        await policy.versions.recover(recovered.version)
        counts = {"waiting": float(recovered.waiting), "interrupted": float(recovered.interrupted)}
        trackers.log_event("resumed", step=recovered.first_step, **counts)


async def _replay(policy: Policy, record: StepRecord) -> bool:
    """Repeats a step that the checkpoint lacks, on the same groups, with a new Version if it had one.

    False when the log has other weights of the step.

    Only the weights that engines will load are written: each Version in turn would fill the disk.
    """
    stats = await policy.repeat(record, await policy.buffer.groups_of(record.step))
    if record.version_after == policy.buffer.recovered.version != record.version:
        await policy.versions.write(record.version_after)
    elif record.version_after != record.version:
        await policy.trainer.write_version(None)
    return await policy.buffer.record_weights(record.step, stats.weights)
