"""Opens the running parts of a prepared run: engines, scorer, runners of tasks, trainer and policy.

`answering` evaluates a model. `opened_policy` adds a trainer; `shoal train` and `shoal.open_policy` call it.
A task's runner is the built-in single turn, or an agent that talks to the model through a session.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shoal.cluster.rank_group import LOST_FOR_GOOD_S, RankGroup
from shoal.cluster.registry import RewardsRole
from shoal.config import Config
from shoal.errors import ModelError
from shoal.experience.buffer import Buffer
from shoal.gateway.host import Host
from shoal.interfaces import Engine, Environment, Runner, Scorer, Worker
from shoal.model.file_sizes import shapes_of
from shoal.net.identity import Identity
from shoal.net.run_server import RunServer
from shoal.reward.service import BinaryScorer, RewardService
from shoal.rollout.agents.clients import Agent
from shoal.rollout.agents.runner import AgentRunner, Play
from shoal.rollout.mixture_weights import BOUNDS, Adjuster
from shoal.rollout.orchestrator import Health, Orchestrator, Source, attend
from shoal.rollout.question_pool import QuestionPool
from shoal.rollout.reward_hooks import hooks_of, processed
from shoal.rollout.single_turn import Runners, SingleTurn
from shoal.run.backup import KEY_FILE
from shoal.run.engines import RunEngines, engines
from shoal.run.machine.devices import gpu_bytes
from shoal.run.machine.memory import Mesh, fitted, trainer_mesh
from shoal.run.policy import Policy
from shoal.run.prepare import Prepared, agents_of
from shoal.run.roles import OnEvent, opened_roles
from shoal.run.teacher import text_teacher
from shoal.tasks.remote_environment import EnvironmentScorer, TaskServer
from shoal.trainer.worker import TrainerProcess, local_ranks
from shoal.types import seed_for
from shoal.weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class AnsweringParts:
    """Running parts that answer tasks and score the answers."""

    engines: RunEngines
    scorer: Scorer
    runner: Runner
    """Runs every task of the run."""


@asynccontextmanager
async def answering(
    prepared: Prepared,
    recovered: int = 0,
    on_event: OnEvent = lambda name, **details: None,
    roles: RunServer | None = None,
) -> AsyncIterator[AnsweringParts]:
    """Starts scorer and engines, and combines the runners of all tasks over both.

    `recovered` is the newest Version of a run, which engines may serve already. Engines and scorers of other hosts join
    by `roles`.
    """
    scorer = prepared.scorer
    async with AsyncExitStack() as stack:
        if scorer is None:
            log = Path(prepared.config.run_dir) / "logs" / "reward.log"
            scorer = await stack.enter_async_context(own_scorer(prepared, log, roles))
        starting = engines(prepared, lambda how: on_event("engine_lost", reason=how), roles, recovered=recovered)
        own = await stack.enter_async_context(starting)
        single = prepared.single_turn(own.pool, prepared.renderer, scorer, prepared.sampling)
        runner = await stack.enter_async_context(playing(prepared, own.pool, single))
        yield AnsweringParts(own, scorer, runner)


@asynccontextmanager
async def opened_policy(
    prepared: Prepared,
    buffer: Buffer,
    *,
    resume: bool = False,
    on_event: OnEvent = lambda name, **details: None,
    on_stage: Callable[[str], None] = lambda words: None,
) -> AsyncIterator[Policy]:
    """Starts engines, scorer and trainer, and joins them in a policy over a buffer.

    Files go to `run_dir`, which the buffer has made. `resume` says that the run existed before. `on_stage` gets words
    for each stage of the start. Raises a `ShoalError`.
    """
    config, threads = prepared.config, prepared.threads.trainer
    store = WeightStore(Path(config.run_dir) / "weights")
    async with AsyncExitStack() as stack:
        opened = stack.enter_async_context
        roles = await opened(opened_roles(prepared, store, on_event))
        if roles is not None:
            from shoal.cluster.workspace_hosts import hosted  # loads the sandbox

            identity = Identity.load(Path(config.run_dir) / KEY_FILE)
            elsewhere = stack.enter_context(hosted(prepared.environments, roles, identity))
            prepared = replace(prepared, hosted=elsewhere)
        ranks, mesh, memory = await opened(_ranks(prepared, roles, shrinks=resume))
        parts = await opened(answering(prepared, buffer.recovered.version, on_event, roles))
        on_stage("starting the trainer")
        if memory:
            config = await asyncio.to_thread(_fitting, prepared, mesh, memory, on_stage)
        trainer = TrainerProcess(ranks)
        await trainer.start(prepared.model_dir, config, threads)
        teacher = await opened(text_teacher(config.train, prepared.renderer))
        draw = orchestrator(prepared, parts.runner, buffer, on_event).run
        policy = Policy(
            prepared.config,
            trainer,
            teacher,
            prepared,
            parts.engines.pool,
            parts.runner,
            parts.scorer,
            buffer,
            store,
            parts.engines,
            draw,
        )
        yield await opened(aclosing(policy))


@asynccontextmanager
async def _ranks(
    prepared: Prepared, roles: RunServer | None, *, shrinks: bool
) -> AsyncIterator[tuple[Sequence[Worker], Mesh, int]]:
    """Starts the ranks of the trainer here, or waits for those of `cluster.trainer`; a resumed run for the hosts left.

    Any number of ranks takes the same steps. With them come how they share the weights, and the memory of their
    smallest GPU, 0 on CPUs.
    """
    config, gpus = prepared.config, prepared.devices.ranks
    places = config.cluster.trainer
    if places is None or roles is None:
        log = Path(config.run_dir) / "logs" / "trainer.log"
        async with local_ranks(log, prepared.threads.trainer, config.train.ranks, gpus) as own:
            memory = gpu_bytes() if gpus else 0
            yield own, trainer_mesh(config, shapes_of(prepared.model_dir), memory), memory
        return
    shapes = shapes_of(prepared.model_dir)
    patience_s = LOST_FOR_GOOD_S if shrinks else None
    group = RankGroup(
        places.ranks,
        places.gpus or None,
        patience_s,
        lambda ranks, memory: trainer_mesh(config, shapes, memory, ranks).per_copy,
    )
    async with group.ranks(roles) as joined:
        yield joined, trainer_mesh(config, shapes, group.gpu_bytes, len(joined)), group.gpu_bytes


def _fitting(prepared: Prepared, mesh: Mesh, memory: int, on_stage: Callable[[str], None]) -> Config:
    """Settings with which a step fits the ranks' GPUs, in words too. Raises `ConfigError` if none does."""
    config = prepared.config
    on_stage(str(mesh))
    try:
        config, fit = fitted(config, prepared.model_dir, mesh, prepared.row_tokens, memory)
    except ModelError as error:
        on_stage(f"memory is not planned: {error}")
        return config
    on_stage(str(fit))
    return config


@asynccontextmanager
async def own_scorer(prepared: Prepared, log: Path, roles: RunServer | None = None) -> AsyncIterator[Scorer]:
    """Starts the scorer of a run's answers; `log` takes its processes' output. Raises `ChildDied`.

    Without local workers the run takes scorers that join by `roles`.
    """
    config = prepared.config
    async with RewardService(config.reward, log) as rewards:
        if roles is not None and rewards.remote is not None:
            roles.open(RewardsRole, rewards.remote.joined)
        rewards_of = {one.name: [one.reward] if isinstance(one.reward, str) else one.reward for one in config.tasks}
        correct_only = {name for name, hooks in rewards_of.items() if "correct" in hooks}
        try:
            yield BinaryScorer(EnvironmentScorer(prepared.environments, rewards), correct_only)
        finally:
            if roles is not None:
                roles.close(RewardsRole)


@asynccontextmanager
async def playing(prepared: Prepared, engine: Engine, single_turn: SingleTurn) -> AsyncIterator[Runner]:
    """Combines the runners of all tasks. Sessions are served where workers register, else on loopback."""
    config, environments, agents = prepared.config, prepared.environments, agents_of(prepared.config)
    plays: dict[str, Play] = {name: one.rollout for name, one in environments.items() if one.converses}
    if not plays and not agents:
        yield single_turn
        return
    async with AsyncExitStack() as stack:
        for name, agent in agents.items():
            plays[name] = await stack.enter_async_context(agent.play())
        at, _ = config.services_at or ("127.0.0.1", 0)
        speeds = {task.name: task.max_running for task in config.tasks}
        hosted = Host.open(engine, prepared.renderer, max_model_len=prepared.max_model_len, at=at)
        host = await stack.enter_async_context(hosted)
        runners, sampling = {}, prepared.sampling
        for name, play in plays.items():
            whose = agents.get(name, environments[name])
            most = partial(_rollouts_at_once, whose, speeds.get(name))
            runners[name] = AgentRunner(
                host, play, single_turn.scorer, sampling, timeout_s=whose.timeout_s, most_at_once=most
            )
        yield Runners(runners, single_turn)


def _rollouts_at_once(whose: Agent | Environment, speed: int | None) -> int | None:
    return min(filter(None, (speed, whose.max_running)), default=None)


def _groups_at_once(environment: Environment, agent: Agent | None, speed: int | None, group_size: int) -> int | None:
    """Groups whose rollouts are taken at once: waiting groups would age and hold others' places.

    `speed` is the task's `max_running`. Answers of one turn start as whole groups, so they are rounded down.
    """
    own = (agent or environment).max_running if agent or environment.converses else None
    most = min((limit for limit in (own, speed) if limit is not None), default=None)
    if most is None:
        return None
    return max(most // group_size, 1) if own is None else -(-most // group_size)


def question_pool(task: Environment, config: Config, buffer: Buffer, on_event: OnEvent) -> QuestionPool | None:
    """Opens the pool of a task's questions with the answers in the log; None, with an event, where it is off."""
    if config.train.dynamic_sampling != "pool":
        return None
    if not (questions := task.questions):
        why = "off: each question is fresh, or drawn by another process, so that no answer tells about a later question"
        on_event("question_pool", task=task.name, reason=why)
        return None
    pool = QuestionPool(questions, config.rollout.group_size, seed_for("question pool", task.name, config.seed))
    buffer.follow(task.name, pool)
    on_event("question_pool", task=task.name, reason=f"chooses among {len(questions)} questions")
    return pool


def orchestrator(
    prepared: Prepared, runner: Runner, buffer: Buffer, on_event: OnEvent = lambda name, **details: None
) -> Orchestrator:
    """Builds the orchestrator over the configured task services and their weights. Must be called on its event loop.

    `on_event` gets the names and details of its events.
    """
    config = prepared.config
    weights = {task.name: task.weight for task in config.tasks}
    weights = {name: weights.get(name, 1.0) for name in prepared.environments}
    ratios, speeds = config.rollout.ratios, {task.name: task.max_running for task in config.tasks}
    bounds = BOUNDS if ratios == "automatic" else None
    hooks = {task.name: hooks_of(task.name, task.reward) for task in config.tasks}
    agents, size = agents_of(config), config.rollout.group_size
    served: TaskServer | None = getattr(prepared.service, "task_server", None)
    drawn = [
        Source(
            one,
            partial(runner.rollouts, n=size),
            partial(_groups_at_once, one, agents.get(name), speeds.get(name), size),
            Health() if served is not None and name in served.services else None,
            question_pool(one, config, buffer, on_event),
        )
        for name, one in prepared.environments.items()
    ]
    made = Orchestrator(
        drawn,
        weights,
        buffer,
        post=lambda group: processed(group, hooks.get(group.task.service, [])),
        adjuster=Adjuster(weights, bounds) if ratios in ("tokens", "automatic") else None,
        seed=config.seed if ratios == "chance" else None,
        on_event=on_event,
    )
    if served is not None:
        attend(served, [one for one in drawn if one.health is not None], made.wake)
    return made
