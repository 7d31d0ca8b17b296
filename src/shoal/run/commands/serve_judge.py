"""`shoal judge serve` runs a judge with its dependencies."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from shoal.config import RewardConfig, TaskConfig, load
from shoal.errors import ConfigError
from shoal.net.identity import Identity
from shoal.net.server import PER_ADDRESS, serving, until_cancelled
from shoal.reward.service import RewardService
from shoal.swarm.judge.judging import Judge, Rules
from shoal.swarm.judge.server import JudgeServer
from shoal.swarm.judge.store import JudgeStore
from shoal.tasks.procedural_client import ProceduralClient, ReasoningGymService, Spec

NINE = (
    *("base_conversion", "basic_arithmetic", "arc_1d", "bf", "propositional_logic", "fraction_simplification"),
    *("decimal_arithmetic", "calendar_arithmetic", "binary_matrix"),
)
"""Specialties of SAPO, with the settings of reasoning-gym."""
SCORE_TIMEOUT_S = 3.0


async def serve_judge(
    config: Path | None,
    folder: Path,
    rules: Rules,
    *,
    host: str,
    port: int,
    workers: int,
    announce: Callable[[str, str], None],
) -> None:
    """Judges until it is cancelled. `announce` gets two lines: URL and peer id. Raises a `ShoalError`."""
    tasks = load(config).tasks if config else [TaskConfig(name=name) for name in NINE]
    identity = Identity.load(folder / "identity.pem")
    async with AsyncExitStack() as stack:
        drawer = stack.enter_context(ProceduralClient())
        specialties = [specialty_of(task, drawer) for task in tasks]
        if len({one.dataset for one in specialties}) != len(specialties):
            raise ConfigError("tasks: a judge asks each dataset with one configuration")
        store = JudgeStore(folder)
        stack.callback(store.close)
        rewards = RewardConfig(workers=workers, timeout_s=SCORE_TIMEOUT_S)
        scorer = await stack.enter_async_context(RewardService(rewards))
        judge = Judge(store, identity, specialties, drawer, scorer, rules)
        judge.ledger()  # committed before the first request
        async with serving(JudgeServer(judge).app, host, port, per_address=PER_ADDRESS) as url:
            announce(url, f"peer id {judge.peer_id}")
            await until_cancelled()


def specialty_of(task: TaskConfig, drawer: ProceduralClient) -> Spec:
    """Settings of a task's questions. Raises `TaskError`, or `ConfigError` for a task that the judge could not
    draw and score."""
    if task.service != "reasoning_gym" or task.scorer is not None:
        raise ConfigError(f"tasks.{task.name}: a judge asks reasoning-gym datasets with their own scorers only")
    return ReasoningGymService(task, 0, drawer).spec
