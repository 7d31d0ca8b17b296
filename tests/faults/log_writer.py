"""Runs groups and trains on them until it is killed: `python log_writer.py RUN_DIR SEED`.

Says on stdout what it was promised is durable: a line `added ID`, `failed ID` or `consumed STEP ID ID ...`.
"""

import asyncio
import os
import random
import sys
from pathlib import Path

import pyarrow.parquet  # noqa: F401  # half a second, which is longer than this process lives

from shoal.experience.buffer import Buffer
from shoal.experience.schema import RunMeta
from shoal.types import Completion, FinishReason, Group, Message, Reward, Role, Rollout, RolloutStatus, Task, Turn

META = RunMeta(max_staleness=2, late="drop", groups_per_step=3, push_every=2)


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def rollout(rollout_id, admitted, served, failed):
    length = random.randint(1, 30)
    versions = sorted(random.choices(range(admitted, served + 1), k=length))
    drawn = Completion(tuple(range(length)), (-0.25,) * length, tuple(versions), FinishReason.STOP)
    status = RolloutStatus.FAILED if failed else RolloutStatus.FINISHED
    reason = "no answer" if failed else ""
    return Rollout(rollout_id, (Message(Role.USER, "?"),), (Turn((1, 2), drawn),), Reward(1.0), status, reason)


async def run_groups(buffer, worker):
    number = 0
    while True:
        number += 1
        group_id, service = f"{sys.argv[2]}-{worker}-{number}", random.choice("ab")
        admitted = await buffer.admit(group_id, service)
        await asyncio.sleep(random.expovariate(1 / 0.003))
        if random.random() < 0.1:
            await buffer.fail(group_id, "service down")
            say("failed", group_id)
            continue
        failures = random.choice([0, 0, 0, 1, 4])
        rollouts = (rollout(f"{group_id}/{i}", admitted, buffer.gate.version, i < failures) for i in range(4))
        await buffer.add(Group(group_id, Task(group_id, service, ()), tuple(rollouts), admitted))
        say("added", group_id)


async def train(buffer):
    last = buffer.recovered.last_step
    step = 0 if last is None else last + 1
    while True:
        version = step // META.push_every
        groups = await buffer.take(META.groups_per_step, version)
        ids = [group.id for group in groups]
        after = (step + 1) // META.push_every
        await buffer.consumed(step, version, ids, version_after=after)
        say("consumed", step, *ids)
        buffer.on_loaded(after)
        if step % 8 == 7:
            await buffer.archive(step - 6)
        step += 1


async def main():
    random.seed(sys.argv[2])
    buffer = Buffer.open(Path(sys.argv[1]), META, max_running=12, resume=True)
    async with asyncio.TaskGroup() as tasks:
        for worker in range(12):
            tasks.create_task(run_groups(buffer, worker))
        tasks.create_task(train(buffer))


asyncio.run(main())
