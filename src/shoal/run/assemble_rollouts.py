"""Each task gets its runner: the built-in single turn, or a conversation with the model through a session."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from shoal.config import Config
from shoal.experience.buffer import Buffer
from shoal.gateway.host import Host
from shoal.interfaces import Engine, Environment, Runner, Scorer
from shoal.observe.metrics import Trackers
from shoal.reward.service import BinaryScorer, RewardService
from shoal.rollout.agents.clients import Agent
from shoal.rollout.agents.runner import AgentRunner, Play
from shoal.rollout.mixture_weights import BOUNDS, Adjuster
from shoal.rollout.orchestrator import Health, Orchestrator, Source, attend
from shoal.rollout.reward_hooks import hooks_of, processed
from shoal.rollout.single_turn import Runners, SingleTurn
from shoal.run.plan import Prepared
from shoal.tasks.mixture import Mixture
from shoal.tasks.remote_environment import EnvironmentScorer
from shoal.types import Sampling


def environments_of(prepared: Prepared) -> Mapping[str, Environment]:
    """Environments of a run, by name."""
    service = prepared.service
    return {one.name: one for one in (service.services if isinstance(service, Mixture) else (service,))}


@asynccontextmanager
async def own_scorer(config: Config, prepared: Prepared, log: Path) -> AsyncIterator[Scorer]:
    """Starts the scorer of a run's answers; `log` takes its processes' output. Raises `ChildDied`."""
    async with RewardService(config.reward, log) as rewards:
        correct_only = {task.name for task in config.tasks if "correct" in _words(task.reward)}
        yield BinaryScorer(EnvironmentScorer(environments_of(prepared), rewards), correct_only)


def _words(reward: str | list[str]) -> list[str]:
    return [reward] if isinstance(reward, str) else reward


def scorer_values(scorer: Scorer) -> Mapping[str, float]:
    """Figures of the run's own scorer; empty for any other."""
    inner = scorer.scorer if isinstance(scorer, BinaryScorer) else scorer
    inner = inner.others if isinstance(inner, EnvironmentScorer) else inner
    return inner.values if isinstance(inner, RewardService) else {}


@asynccontextmanager
async def playing(
    config: Config, prepared: Prepared, engine: Engine, single_turn: SingleTurn, sampling: Sampling
) -> AsyncIterator[Runner]:
    """Combines the runners of all tasks. Sessions are served where workers register, else on loopback."""
    environments = environments_of(prepared)
    plays: dict[str, Play] = {name: one.rollout for name, one in environments.items() if one.converses}
    if not plays and not prepared.agents:
        yield single_turn
        return
    async with AsyncExitStack() as stack:
        for name, agent in prepared.agents.items():
            plays[name] = await stack.enter_async_context(agent.play())
        at, _ = config.services_at or ("127.0.0.1", 0)
        hosted = Host.open(engine, prepared.renderer, max_model_len=prepared.max_model_len, at=at)
        host = await stack.enter_async_context(hosted)
        runners = {}
        for name, play in plays.items():
            whose = prepared.agents.get(name, environments[name])
            runners[name] = AgentRunner(
                host, play, single_turn.scorer, sampling, timeout_s=whose.timeout_s, max_at_once=whose.max_running
            )
        yield Runners(runners, single_turn)


def _groups_at_once(environment: Environment, agent: Agent | None, group_size: int) -> int | None:
    """Groups whose rollouts are taken at once: waiting groups would age and hold others' places."""
    whose = agent or environment
    most = whose.max_running if agent or environment.converses else None
    return None if most is None else -(-most // group_size)


def orchestrator(
    config: Config, prepared: Prepared, runner: Runner, buffer: Buffer, trackers: Trackers
) -> Orchestrator:
    """Builds the orchestrator over the configured task services and their weights. Must be called on its event loop."""

    def presence(name: str, present: bool) -> None:
        (made.come if present else made.leave)(name)
        trackers.log_event("service", task=name, state="there" if present else "away")

    weights = {task.name: task.weight for task in config.tasks}
    weights = {name: weights.get(name, 1.0) for name in environments_of(prepared)}
    bounds = BOUNDS if config.rollout.ratios == "automatic" else None
    hooks = {task.name: hooks_of(task.name, task.reward) for task in config.tasks}
    size, served = config.rollout.group_size, getattr(prepared.service, "task_server", None)
    drawn = [
        Source(
            one,
            partial(runner.rollouts, n=size),
            presence,
            partial(_groups_at_once, one, prepared.agents.get(name), size),
            Health() if served is not None and name in served.served else None,
        )
        for name, one in environments_of(prepared).items()
    ]
    made = Orchestrator(
        drawn,
        weights,
        buffer,
        post=lambda group: processed(group, hooks.get(group.task.service, [])),
        adjuster=None if config.rollout.ratios == "fixed" else Adjuster(weights, bounds),
        on_event=trackers.log_event,
    )
    if served is not None:
        attend(served, [one for one in drawn if one.health is not None], made.wake)
    return made
