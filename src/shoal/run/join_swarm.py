"""A peer of a swarm, with its exchange, identity and tasks; a run reports whether it is connected."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.interfaces import Environment, Exchange
from shoal.net.identity import Identity
from shoal.swarm.peer import Joined, Peer
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.trust.python_tasks import PythonTasks
from shoal.swarm.wire.invitation import NatsOptions

FOLDER = "swarm"
"""Folder in a run directory for identity, ban list and status."""
AWAY_S = 10.0
"""Seconds between two looks at a node's connection; a run reports a loss that lasts at the next look."""


@asynccontextmanager
async def joined_peer(
    config: Config, folder: Path, services: Sequence[Environment], exchange: Exchange | None = None
) -> AsyncIterator[Joined]:
    """Opens the exchange, the tasks and the key of a peer; its files are under `folder`. Raises a `ShoalError`."""
    folder /= FOLDER
    async with AsyncExitStack() as stack:
        if exchange is None:
            if not config.swarm.servers:
                raise ConfigError("swarm.servers: expected at least one URL to join at, got none")
            from shoal.swarm.wire.nats import NatsExchange

            options = NatsOptions(config.swarm.servers, config.swarm.name)
            exchange = await stack.enter_async_context(NatsExchange(options))
        identity = Identity.load(folder / "identity.pem")
        python = PythonTasks(services)
        own = OwnTasks(services, config.swarm, await stack.enter_async_context(python))
        stack.push_async_callback(asyncio.to_thread, own.close)
        await asyncio.to_thread(own.check)
        yield Joined(exchange, own, identity, folder, config)


async def report_connection(peer: Peer, on_event: Callable[..., None], every_s: float = AWAY_S) -> None:
    """Runs until cancelled: reports a lasting loss of all servers of the swarm, and the reconnection."""
    reached = True
    while True:
        await asyncio.sleep(every_s)
        if peer.connected != reached:
            reached = peer.connected
            if reached:
                on_event("swarm_back")
            else:
                on_event("swarm_away", reason=str(peer.status()["failure"]) or "no server of the swarm answers")
