"""Each task gets its runner: the built-in single turn, or an agent that talks to the model through a session."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeGuard

from shoal.config import Config
from shoal.experience import Buffer
from shoal.interfaces import Engine, Playable, Runner, Scorer, TaskService
from shoal.observe.metrics import Trackers
from shoal.reward.binary_scorer import BinaryScorer
from shoal.reward.service import RewardService
from shoal.rollout.agents.clients import TIMEOUT_S, Agent
from shoal.rollout.agents.host import Host
from shoal.rollout.agents.native import native_play
from shoal.rollout.agents.runner import AgentRunner, Play
from shoal.rollout.agents.services import RemoteSource, attend, remote_play
from shoal.rollout.mixture_weights import Change, WeightBounds
from shoal.rollout.orchestrator import Adjustment, LocalSource, Orchestrator, Source
from shoal.rollout.reward_hooks import hooks_of, processed
from shoal.rollout.single_turn import Runners, SingleTurn
from shoal.run.plan import Prepared
from shoal.tasks.library import Library
from shoal.tasks.mixture import Mixture
from shoal.tasks.remote_protocol import Capability
from shoal.tasks.remote_tasks import RemoteService, Scoring, ServiceScorer
from shoal.tasks.sdk import Definition
from shoal.types import Rollout, Sampling, Task


def services_of(prepared: Prepared) -> Mapping[str, TaskService]:
    """Task services of a run, by name."""
    service = prepared.service
    services = service.services if isinstance(service, Mixture) else (service,)
    return {one.name: one for one in services}


def scoring(prepared: Prepared, others: Scorer) -> Scorer:
    """Combines the scorer with the task services that score their own rollouts."""
    own: dict[str, Scoring] = {
        name: service
        for name, service in services_of(prepared).items()
        if isinstance(service, RemoteService | Definition) and service.has(Capability.SCORE)
    }
    return ServiceScorer(own, others) if own else others


@asynccontextmanager
async def own_scorer(config: Config, prepared: Prepared, log: Path) -> AsyncIterator[Scorer]:
    """Starts the scorer of a run's answers; `log` takes its processes' output. Raises `ChildDied`."""
    async with RewardService(config.reward, log) as rewards:
        correct_only = {task.name for task in config.tasks if "correct" in _words(task.reward)}
        scorer = scoring(prepared, rewards)
        yield BinaryScorer(scorer, correct_only) if correct_only else scorer


def _words(reward: str | list[str]) -> list[str]:
    return [reward] if isinstance(reward, str) else reward


def scorer_values(scorer: Scorer) -> Mapping[str, float]:
    """Figures of the run's own scorer; empty for any other."""
    inner = scorer.scorer if isinstance(scorer, BinaryScorer) else scorer
    inner = inner.others if isinstance(inner, ServiceScorer) else inner
    return inner.values if isinstance(inner, RewardService) else {}


@asynccontextmanager
async def playing(
    config: Config, prepared: Prepared, engine: Engine, single_turn: SingleTurn, sampling: Sampling
) -> AsyncIterator[Runner]:
    """Combines the runners of all task services. Sessions are served where task services register, else on loopback."""
    services = services_of(prepared)
    plays = {name: play for name, one in services.items() if (play := _play_of(one)) is not None}
    if not plays and not prepared.agents:
        yield single_turn
        return
    async with AsyncExitStack() as stack:
        for name, agent in prepared.agents.items():
            plays[name] = await stack.enter_async_context(agent.play())
        at, _ = config.services_at or ("127.0.0.1", 0)
        hosted = Host.open(engine, prepared.renderer, max_model_len=prepared.max_model_len, sampling=sampling, at=at)
        host = await stack.enter_async_context(hosted)
        timeouts_s = {
            name: one.timeout_s if isinstance(one, RemoteService | Definition) else TIMEOUT_S
            for name, one in services.items()
        } | {name: agent.timeout_s for name, agent in prepared.agents.items()}
        most = {name: agent.max_at_once for name, agent in prepared.agents.items()}
        yield Runners(
            {
                name: AgentRunner(
                    host, play, single_turn.scorer, timeout_s=timeouts_s[name], max_at_once=most.get(name)
                )
                for name, play in plays.items()
            },
            single_turn,
        )


def _play_of(service: TaskService) -> Play | None:
    """Playing function of a task service; None when the run answers its tasks in one turn."""
    if isinstance(service, RemoteService):
        return remote_play(service) if service.has(Capability.ROLLOUT) else None
    if isinstance(service, Definition) and not service.has(Capability.ROLLOUT):
        return None
    return native_play(service) if _is_playable(service) else None


def _is_playable(service: TaskService) -> TypeGuard[Playable]:
    return callable(getattr(service, "play", None))


def sources(
    config: Config, prepared: Prepared, runner: Runner, on_presence: Callable[[str, bool], None]
) -> list[Source]:
    """Sources that the orchestrator draws from."""
    size = config.rollout.group_size
    answer: Callable[[Task], Awaitable[tuple[Rollout, ...]]] = partial(runner.rollouts, n=size)
    return [
        RemoteSource(service, answer, size, on_presence)
        if isinstance(service, RemoteService)
        else LocalSource(service, answer, on_presence, _groups_at_once(prepared.agents.get(name), size))
        for name, service in services_of(prepared).items()
    ]


def _groups_at_once(agent: Agent | None, group_size: int) -> int | None:
    """Groups whose rollouts an agent takes at once: waiting groups would age and hold others' places."""
    return None if agent is None or agent.max_at_once is None else -(-agent.max_at_once // group_size)


def orchestrator(
    config: Config, prepared: Prepared, runner: Runner, buffer: Buffer, trackers: Trackers
) -> Orchestrator:
    """Builds the orchestrator over the configured task services and their weights. Must be called on its event loop."""

    def report(change: Change) -> None:
        trackers.log_event("ratio", task=change.name, before=change.before, after=change.after, reason=change.reason)

    def presence(name: str, present: bool) -> None:
        (made.come if present else made.leave)(name)
        trackers.log_event("service", task=name, state="there" if present else "away")

    weights = {task.name: task.weight for task in config.tasks}
    bounds = WeightBounds() if config.rollout.ratios == "automatic" else None
    hooks = {task.name: hooks_of(task.name, task.reward) for task in config.tasks}
    drawn = sources(config, prepared, runner, presence)
    made = Orchestrator(
        drawn,
        {one.name: weights.get(one.name, 1.0) for one in drawn},
        buffer,
        post=lambda group: processed(group, hooks.get(group.task.service, [])),
        adjustment=None if config.rollout.ratios == "fixed" else Adjustment(bounds, report),
        told=lambda reason: trackers.log_event("groups_unusable", reason=reason),
        on_failure=lambda reason: trackers.log_event("rollout_failed", reason=reason),
    )
    if isinstance(prepared.service, Library) and prepared.service.task_server is not None:
        attend(prepared.service.task_server, drawn, made.wake)
    return made
