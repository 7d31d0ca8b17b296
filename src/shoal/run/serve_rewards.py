"""`shoal rewards serve` runs a scorer for runs on other machines."""

from collections.abc import Callable
from pathlib import Path

import uvicorn

from shoal.config import RewardConfig
from shoal.net.listening import listening_socket, url_of
from shoal.net.server import uvicorn_config
from shoal.reward.server import RewardServer
from shoal.reward.service import RewardService


async def serve_rewards(
    config: RewardConfig, *, host: str, port: int, token: str, announce: Callable[[str], None], log: Path
) -> None:
    """Scores until SIGTERM or SIGINT. `announce` gets the URL. Raises a `ShoalError`."""
    async with RewardService(config, log) as service:  # before it listens: what cannot start ends the command
        with listening_socket(host, port) as bound:
            announce(url_of(bound))
            app = RewardServer(service, token=token).app
            server = uvicorn.Server(uvicorn_config(app))
            await server.serve(sockets=[bound])
