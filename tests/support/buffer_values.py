"""Groups and runs of the buffer, shared by its tests."""

from shoal.experience.buffer import Buffer
from shoal.experience.schema import RunMeta
from shoal.trainer import advantage
from shoal.types import (
    Completion,
    FinishReason,
    Group,
    Message,
    Origin,
    Receipt,
    Reward,
    Role,
    Rollout,
    RolloutStatus,
    Task,
    Turn,
)

META = RunMeta(max_staleness=1, late="drop", groups_per_step=2, push_every=1)
RECEIPT = Receipt("chain_sum", "0.1.25", "{}", seed=7, index=3)


def rollout(rollout_id, versions=(0, 0), *, failed=False, reason="", drawn=None):
    drawn = drawn or Completion((5,) * len(versions), (-0.5,) * len(versions), tuple(versions), FinishReason.STOP)
    return Rollout(
        rollout_id,
        (Message(Role.USER, "1 + 1 ="), Message(Role.ASSISTANT, "2")),
        (Turn((1, 2, 3), drawn),),
        Reward(1.0),
        RolloutStatus.FAILED if failed else RolloutStatus.FINISHED,
        reason,
    )


def group(group_id, versions=(0, 0), *, admitted=0, service="chain_sum", size=2, failed=0, peer=None):
    task = Task(f"t-{group_id}", service, (Message(Role.USER, "1 + 1 ="),), answer="2", receipt=RECEIPT)
    rollouts = (
        rollout(f"{group_id}/{i}", versions, failed=i < failed, reason="no answer" if i < failed else "")
        for i in range(size)
    )
    origin = None if peer is None else Origin(peer, f"{peer}/{group_id}")
    return Group(group_id, task, tuple(rollouts), admitted, origin)


async def run_group(buffer, group_id, versions=None, **kwargs):
    """Admits and finishes one group; its tokens are of the admitted version unless said otherwise."""
    admitted = await buffer.admit(group_id, kwargs.get("service", "chain_sum"))
    drawn = (admitted, admitted) if versions is None else versions
    return await buffer.add(group(group_id, drawn, admitted=admitted, **kwargs))


async def train(buffer, step, version, n=2, push=True):
    """Takes and consumes one step, and publishes what comes of it."""
    groups = await buffer.take(n, version)
    after = version + push
    await buffer.consumed(step, version, [g.id for g in groups], version_after=after)
    buffer.on_loaded(after)
    return [g.id for g in groups]


def open_buffer(run_dir, meta=META, *, max_running=64, resume=False):
    return Buffer.open(run_dir, meta, max_running=max_running, resume=resume)


def masked_rows(groups, bound, value=1.0):
    """What the trainer is given of groups when tokens older than `bound` are masked; all others have an advantage."""
    rows = {group.id: [row for one in group.finished for row in advantage.rows(one, value)] for group in groups}
    return {name: advantage.mask_tokens(group_rows, bound)[0] for name, group_rows in rows.items()}
