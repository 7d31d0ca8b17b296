"""The parts of a run, each opened from its configuration: scorer, engines, runners, orchestrator, trainer.

A task's runner is the built-in single turn, or an agent that talks to the model through a session.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from shoal.config import Config
from shoal.experience.buffer import Buffer
from shoal.gateway.host import Host
from shoal.interfaces import Engine, Environment, Runner, Scorer
from shoal.net.run_server import RunServer
from shoal.rollout.agents.clients import Agent, agent_of
from shoal.rollout.agents.runner import AgentRunner, Play
from shoal.rollout.mixture_weights import BOUNDS, Adjuster
from shoal.rollout.orchestrator import Health, Orchestrator, Source, attend
from shoal.rollout.reward_hooks import hooks_of, processed
from shoal.rollout.single_turn import Runners, SingleTurn
from shoal.run.engines import EngineSettings, OnEvent, OwnEngines, engines
from shoal.run.machine.devices import Threads
from shoal.run.prepare import Prepared
from shoal.run.rewards import own_scorer
from shoal.tasks.remote_server import TaskServer


@asynccontextmanager
async def serving(
    config: Config,
    prepared: Prepared,
    run_dir: Path,
    *,
    scorer: Scorer | None = None,
    single_turn: type[SingleTurn] = SingleTurn,
    threads: Threads | None = None,
    recovered: int | None = None,
    resume: bool = False,
    on_event: OnEvent = lambda how: None,
    own: OwnEngines | None = None,
    roles: RunServer | None = None,
) -> AsyncIterator[tuple[Engine, SingleTurn]]:
    """Starts the engines as one, a scorer, and the runner over both; `on_event` gets the loss of an engine.

    Engines and scorers of other hosts join by `roles`. `recovered` is the newest Version of a run, which engines may
    serve already; None outside of runs. `resume` says that the run existed before.
    """
    settings = EngineSettings(config, prepared, run_dir, (threads or Threads()).engine, recovered or 0, resume)
    async with AsyncExitStack() as stack:
        if scorer is None:
            log, resumable = run_dir / "logs" / "reward.log", recovered is not None
            opening = own_scorer(config, prepared, log, resumable=resumable, roles=roles)
            scorer = await stack.enter_async_context(opening)
        pool = await stack.enter_async_context(engines(settings, on_event, own or OwnEngines(), roles))
        yield pool, single_turn(pool, prepared.renderer, scorer, prepared.sampling)


@asynccontextmanager
async def playing(config: Config, prepared: Prepared, engine: Engine, single_turn: SingleTurn) -> AsyncIterator[Runner]:
    """Combines the runners of all tasks. Sessions are served where workers register, else on loopback."""
    environments, agents = prepared.environments, _agents(config)
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
            most = min(filter(None, (speeds.get(name), whose.max_running)), default=None)
            runners[name] = AgentRunner(
                host, play, single_turn.scorer, sampling, timeout_s=whose.timeout_s, max_at_once=most
            )
        yield Runners(runners, single_turn)


def _agents(config: Config) -> dict[str, Agent]:
    """Agents of tasks that name one."""
    return {
        task.name: agent_of(task.agent, f"tasks.{task.name}.agent", task.max_running)
        for task in config.tasks
        if task.agent is not None
    }


def _groups_at_once(environment: Environment, agent: Agent | None, speed: int | None, group_size: int) -> int | None:
    """Groups whose rollouts are taken at once: waiting groups would age and hold others' places.

    `speed` is the task's `max_running`. Answers of one turn start as whole groups, so they are rounded down.
    """
    own = (agent or environment).max_running if agent or environment.converses else None
    most = min((limit for limit in (own, speed) if limit is not None), default=None)
    if most is None:
        return None
    return max(most // group_size, 1) if own is None else -(-most // group_size)


def orchestrator(
    config: Config,
    prepared: Prepared,
    runner: Runner,
    buffer: Buffer,
    on_event: Callable[..., None] = lambda name, **details: None,
) -> Orchestrator:
    """Builds the orchestrator over the configured task services and their weights. Must be called on its event loop.

    `on_event` gets the names and details of its events.
    """
    weights = {task.name: task.weight for task in config.tasks}
    weights = {name: weights.get(name, 1.0) for name in prepared.environments}
    ratios, speeds = config.rollout.ratios, {task.name: task.max_running for task in config.tasks}
    bounds = BOUNDS if ratios == "automatic" else None
    hooks = {task.name: hooks_of(task.name, task.reward) for task in config.tasks}
    agents, size = _agents(config), config.rollout.group_size
    served: TaskServer | None = getattr(prepared.service, "task_server", None)
    drawn = [
        Source(
            one,
            partial(runner.rollouts, n=size),
            partial(_groups_at_once, one, agents.get(name), speeds.get(name), size),
            Health() if served is not None and name in served.services else None,
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
