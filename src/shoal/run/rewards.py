"""The scorer of a run: workers, environments that score their own tasks, and rewards of exactly 1 or 0 where asked."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from shoal.cluster.registry import RewardsRole
from shoal.config import Config
from shoal.errors import ChildDied
from shoal.interfaces import Scorer
from shoal.net.run_server import LeasedWorker, RunServer
from shoal.reward.remote import RemoteScorer
from shoal.reward.service import BinaryScorer, RewardService
from shoal.run.prepare import Prepared
from shoal.tasks.remote_environment import EnvironmentScorer
from shoal.types import Reward, Task


class ResumableRewards(RewardService):
    """Scorer of a run: when its workers end for good, the run does, with a sentence that tells how to continue."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """One reward per answer, in order. Raises `ChildDied` when no worker can be started any more."""
        try:
            return await super().score(task, answers)
        except ChildDied as error:
            raise ChildDied(f"{error}; go on with --resume") from error


@asynccontextmanager
async def own_scorer(
    config: Config, prepared: Prepared, log: Path, *, resumable: bool = False, roles: RunServer | None = None
) -> AsyncIterator[Scorer]:
    """Starts the scorer of a run's answers; `log` takes its processes' output. Raises `ChildDied`.

    Without local workers the run takes scorers that join by `roles`.
    """
    async with (ResumableRewards if resumable else RewardService)(config.reward, log) as rewards:
        if roles is not None and rewards.remote is not None:
            roles.open(RewardsRole, partial(_joined, rewards.remote))
        correct_only = {task.name for task in config.tasks if "correct" in _words(task.reward)}
        try:
            yield BinaryScorer(EnvironmentScorer(prepared.environments, rewards), correct_only)
        finally:
            if roles is not None:
                roles.close(RewardsRole)


@asynccontextmanager
async def _joined(scorer: RemoteScorer, role: RewardsRole, worker: LeasedWorker) -> AsyncIterator[None]:
    """Has a scorer that joined asked, until it leaves."""
    scorer.add(worker.name, role.url, role.token)
    try:
        yield
    finally:
        await scorer.remove(worker.name)


def _words(reward: str | list[str]) -> list[str]:
    return [reward] if isinstance(reward, str) else reward
