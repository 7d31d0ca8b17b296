"""`shoal judge serve` and `audit` run a judge with its dependencies."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import uvicorn

from shoal.config import Config, RewardConfig, TaskConfig, load
from shoal.errors import ConfigError
from shoal.net.listening import listening_socket, url_of
from shoal.net.server import PER_ADDRESS, uvicorn_config
from shoal.reward.service import RewardService
from shoal.swarm.identity import Identity
from shoal.swarm.judge.client import audit
from shoal.swarm.judge.judging import Judge, Rules
from shoal.swarm.judge.messages import Specialty
from shoal.swarm.judge.server import JudgeServer
from shoal.swarm.judge.store import JudgeStore
from shoal.tasks.library import ReasoningGymService
from shoal.tasks.procedural_client import ProceduralClient
from shoal.types import Split

NINE = (
    "base_conversion",
    "basic_arithmetic",
    "arc_1d",
    "bf",
    "propositional_logic",
    "fraction_simplification",
    "decimal_arithmetic",
    "calendar_arithmetic",
    "binary_matrix",
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
    """Judges until SIGTERM or SIGINT. `announce` gets URL and peer id. Raises a `ShoalError`."""
    tasks = _tasks(load(config)) if config else [TaskConfig(name=name) for name in NINE]
    identity = Identity.load(folder / "identity.pem")
    async with AsyncExitStack() as stack:
        drawer = stack.enter_context(ProceduralClient())
        specialties = [specialty_of(task, drawer) for task in tasks]
        store = JudgeStore(folder)
        stack.callback(store.close)
        rewards = RewardConfig(workers=workers, timeout_s=SCORE_TIMEOUT_S)
        scorer = await stack.enter_async_context(RewardService(rewards))
        judge = Judge(store, identity, specialties, drawer, scorer, rules)
        await asyncio.to_thread(judge.rehearse)
        judge.ledger()  # committed to before anybody can ask
        listening = stack.enter_context(listening_socket(host, port))
        announce(url_of(listening), identity.peer_id)
        app = JudgeServer(judge, [one.dataset for one in specialties]).app
        await uvicorn.Server(uvicorn_config(app, per_address=PER_ADDRESS)).serve(sockets=[listening])


async def audit_judge(url: str, judge: str | None) -> tuple[int, list[str]]:
    """Audits a judge; returns the number of challenges checked, and all complaints. Raises a `ShoalError`."""
    async with RewardService(RewardConfig(timeout_s=SCORE_TIMEOUT_S)) as scorer:
        with ProceduralClient() as drawer:
            return await audit(url, drawer, scorer, judge=judge)


def specialty_of(task: TaskConfig, drawer: ProceduralClient) -> Specialty:
    """Converts a task to a judge's specialty, and draws its first question as a test. Raises `TaskError`."""
    service = ReasoningGymService(task, 0, drawer)
    receipt = service.draw(Split.EVAL, 0).receipt
    assert receipt is not None
    rewrite = tuple((pattern, replacement) for pattern, replacement in task.rewrite)
    return Specialty(task.name, receipt.dataset_version, receipt.config, task.system_prompt, rewrite)


def _tasks(config: Config) -> list[TaskConfig]:
    """Raises `ConfigError` for tasks that an auditor could not draw and score again."""
    for task in config.tasks:
        if task.service != "reasoning_gym" or task.scorer is not None:
            raise ConfigError(f"tasks.{task.name}: a judge asks reasoning-gym datasets with their own scorers only")
    names = [task.name for task in config.tasks]
    if len(set(names)) != len(names):
        raise ConfigError("tasks: a judge asks each dataset with one configuration")
    return list(config.tasks)
