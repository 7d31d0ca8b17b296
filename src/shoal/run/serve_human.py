"""`shoal swarm desk` runs the human UI: a node of a swarm whose generators are people."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import uvicorn

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.net.listening import listening_socket, url_of
from shoal.net.server import PER_ADDRESS, uvicorn_config
from shoal.reward.service import RewardService
from shoal.run.join_swarm import FOLDER
from shoal.swarm.claim_verification import OwnTasks
from shoal.swarm.human.human_node import HumanNode, HumanNodeDeps
from shoal.swarm.human.questions import QuestionPace
from shoal.swarm.human.server import HumanServer
from shoal.swarm.identity import Identity
from shoal.swarm.nats import NatsExchange
from shoal.swarm.options import options_of
from shoal.tasks.library import library_of
from shoal.types import Split


async def serve_human(
    config: Config, folder: Path, pace: QuestionPace, *, host: str, port: int, announce: Callable[[str, str], None]
) -> None:
    """Asks people until SIGTERM or SIGINT. `announce` gets URL and peer id. Raises a `ShoalError`.

    It loads no model: only tasks, rewards and swarm of the configuration are read.
    """
    if not config.swarm.servers:
        raise ConfigError("swarm.servers: expected at least one URL to offer answers at, got none")
    options = options_of(config.swarm.servers, config.swarm.name)
    folder = folder / FOLDER
    identity = Identity.load(folder / "identity.pem")
    async with AsyncExitStack() as stack:
        library = stack.enter_context(library_of(config))
        own = OwnTasks(library.services)
        stack.callback(own.close)
        scorer = await stack.enter_async_context(RewardService(config.reward))
        exchange = await stack.enter_async_context(NatsExchange(options))
        deps = HumanNodeDeps(exchange, own, scorer, lambda index: library.draw(Split.TRAIN, index))
        node = HumanNode(deps, config.swarm.name, identity, folder, pace)
        listening = stack.enter_context(listening_socket(host, port))
        announce(url_of(listening), identity.peer_id)
        server = uvicorn.Server(uvicorn_config(HumanServer(node).app, per_address=PER_ADDRESS))
        async with asyncio.TaskGroup() as parts:
            running = parts.create_task(node.run(), name="human UI")
            await server.serve(sockets=[listening])
            running.cancel()
