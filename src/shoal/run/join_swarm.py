"""Peers of a swarm with exchange, identity and tasks: the node of a run, a generator, and the human UI."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import uvicorn

from shoal.config import Config
from shoal.config.urls import checked_url
from shoal.errors import ConfigError
from shoal.experience.log import external_groups, snapshot
from shoal.interfaces import Environment, Exchange, Scorer
from shoal.net.listening import listening_socket, url_of
from shoal.net.server import PER_ADDRESS, uvicorn_config
from shoal.reward.service import RewardService
from shoal.run.prepared import Prepared
from shoal.run.rewards import own_scorer
from shoal.swarm.answerers import ChatModel, ModelAt, RuleSolver
from shoal.swarm.claim_verification import OwnTasks
from shoal.swarm.generator import Generator, GeneratorPace
from shoal.swarm.human.human_node import HumanNode, HumanNodeDeps
from shoal.swarm.human.questions import QuestionPace
from shoal.swarm.human.server import HumanServer
from shoal.swarm.identity import Identity
from shoal.swarm.node import Node, NodeDeps
from shoal.swarm.options import NatsOptions
from shoal.tasks.library import library_of
from shoal.types import Split

FOLDER = "swarm"
"""Folder in a run directory for identity, ban list and status."""
MOST_REMEMBERED = 16_384
"""External groups that a resumed run remembers as trained."""


@asynccontextmanager
async def _joined(
    config: Config, folder: Path, services: Sequence[Environment], exchange: Exchange | None = None
) -> AsyncIterator[tuple[Exchange, OwnTasks, Identity]]:
    """Opens the exchange, the tasks and the key of a peer whose files are in `folder`. Raises a `ShoalError`."""
    async with AsyncExitStack() as stack:
        if exchange is None:
            from shoal.swarm.nats import NatsExchange

            options = NatsOptions(config.swarm.servers, config.swarm.name)
            exchange = await stack.enter_async_context(NatsExchange(options))
        own = OwnTasks(services, config.swarm)
        stack.callback(own.close)
        await asyncio.to_thread(own.check)
        yield exchange, own, Identity.load(folder / "identity.pem")


@asynccontextmanager
async def swarm_node(
    config: Config, prepared: Prepared, run_dir: Path, scorer: Scorer, exchange: Exchange | None, *, apart: bool
) -> AsyncIterator[Node | None]:
    """Opens the node of a run; None outside of swarms. `exchange` replaces the servers. Raises a `ShoalError`.

    The run's log is open by now. `scorer` is the run's. Peers' answers scored `apart` have a worker process of their
    own, so a hanging answer of a peer delays no answer of the run.
    """
    if exchange is None and not config.swarm.servers:
        yield None
        return
    services, folder = list(prepared.environments.values()), run_dir / FOLDER
    async with AsyncExitStack() as stack:
        joined = await stack.enter_async_context(_joined(config, folder, services, exchange))
        if apart and config.swarm.external_groups:
            alone = config.model_copy(update={"reward": config.reward.model_copy(update={"workers": 1})})
            log = run_dir / "logs" / "peers.log"
            scorer = await stack.enter_async_context(own_scorer(alone, prepared, log, resumable=True))
        deps = NodeDeps(
            *joined[:2],
            prepared.renderer,
            scorer,
            prepared.max_model_len,
            Path(config.model.path).name or "model",
            max(config.rollout.group_size, 2),
            config.train.groups_per_step,
        )
        with snapshot(run_dir) as connection:
            trained = external_groups(connection, MOST_REMEMBERED)
        yield Node(deps, config.swarm, joined[2], folder, seed=config.seed, trained=trained)


def answerer_of(
    config: Config, model_url: str | None, model: str, key: str, rule: str | None
) -> ChatModel | RuleSolver:
    """Chooses a generator's answerer: exactly one of a model's URL and a rule. Raises `ConfigError`."""
    if (model_url is None) == (rule is None):
        raise ConfigError("swarm join: expected either --model-url or --rule; to train, use shoal train")
    if model_url is None:
        return RuleSolver(str(rule), config.seed)
    url, rollout = checked_url("--model-url", model_url), config.rollout
    return ChatModel(ModelAt(url, model, key, rollout.max_tokens, rollout.temperature))


async def generate(config: Config, answerer: ChatModel | RuleSolver, pace: GeneratorPace) -> None:
    """Shares the groups of the pace. Raises a `ShoalError`."""
    folder = _peer_folder(config, Path(config.run_dir))
    async with AsyncExitStack() as stack:
        services = stack.enter_context(library_of(config)).services
        exchange, own, identity = await stack.enter_async_context(_joined(config, folder, services))
        if isinstance(answerer, ChatModel):
            await stack.enter_async_context(answerer)
        name = config.swarm.name
        await Generator(exchange, own, services, answerer, identity, folder, swarm=name, pace=pace).run()


async def serve_human(
    config: Config, folder: Path, pace: QuestionPace, *, host: str, port: int, announce: Callable[[str, str], None]
) -> None:
    """Asks people in the human UI until SIGTERM or SIGINT. `announce` gets URL and peer id. Raises a `ShoalError`.

    It loads no model: only tasks, rewards and swarm of the configuration are read.
    """
    folder = _peer_folder(config, folder)
    async with AsyncExitStack() as stack:
        library = stack.enter_context(library_of(config))
        exchange, own, identity = await stack.enter_async_context(_joined(config, folder, library.services))
        scorer = await stack.enter_async_context(RewardService(config.reward))
        deps = HumanNodeDeps(exchange, own, scorer, lambda index: library.draw(Split.TRAIN, index))
        node = HumanNode(deps, config.swarm.name, identity, folder, pace)
        listening = stack.enter_context(listening_socket(host, port))
        announce(url_of(listening), identity.peer_id)
        server = uvicorn.Server(uvicorn_config(HumanServer(node).app, per_address=PER_ADDRESS))
        async with asyncio.TaskGroup() as parts:
            running = parts.create_task(node.run(), name="human UI")
            await server.serve(sockets=[listening])
            running.cancel()


def _peer_folder(config: Config, folder: Path) -> Path:
    """Folder of a peer without a run. Raises `ConfigError` when it has no swarm."""
    if not config.swarm.servers:
        raise ConfigError("swarm.servers: expected at least one URL to join at, got none")
    return folder / FOLDER
