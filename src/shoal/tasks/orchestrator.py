"""Keeps the engine fed: draws tasks, runs a group on each, and hands finished groups to the buffer.

One loop consumes admissions (it waits for the staleness gate, and is unblocked by a new version or by a group that
frees its place) and starts one coroutine per admitted group. A group's coroutine waits for the engine and for the
scorer only. Nothing here waits for training, saving or evaluation.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from shoal.interfaces import TaskService
from shoal.types import Group, Rollout, Split, Task


class Admission(Protocol):
    """What the orchestrator knows of the buffer."""

    async def admit(self, group_id: str, service: str) -> int:
        """Waits until one more group may start and records it; the version it is admitted under."""
        ...

    async def add(self, group: Group) -> bool:
        """Takes a group that ran; returns once it is durable. False when too few of its rollouts are usable."""
        ...


class Orchestrator:
    """Runs groups until it is cancelled. Every admitted group is added exactly once, unless cancelled before."""

    def __init__(
        self,
        service: TaskService,
        rollouts: Callable[[Task], Awaitable[tuple[Rollout, ...]]],
        admission: Admission,
        first_index: int,
    ) -> None:
        """`first_index` is where drawing goes on: a resumed run never draws an index twice."""
        self._service = service
        self._rollouts = rollouts
        self._admission = admission
        self._next_index = first_index

    async def run(self) -> None:
        """Draws and runs groups for ever."""
        async with asyncio.TaskGroup() as groups:
            while True:
                index = self._next_index
                self._next_index += 1
                # Drawing may build a puzzle for milliseconds; the loop must go on answering meanwhile.
                task = await asyncio.to_thread(self._service.draw, Split.TRAIN, index)
                version = await self._admission.admit(f"g{index}", task.service)
                groups.create_task(self._run_group(f"g{index}", task, version), name=f"group g{index}")

    async def _run_group(self, group_id: str, task: Task, version: int) -> None:
        rollouts = await self._rollouts(task)
        await self._admission.add(Group(group_id, task, rollouts, version))
