"""`shoal rewards serve` runs a scorer for runs on other machines."""

from collections.abc import Callable
from pathlib import Path

from shoal.config import RewardConfig
from shoal.net.server import serve_app
from shoal.reward.server import RewardServer
from shoal.reward.service import RewardService


async def serve_rewards(
    config: RewardConfig, *, host: str, port: int, token: str, announce: Callable[[str], None], log: Path
) -> None:
    """Scores until SIGTERM or SIGINT. `announce` gets the URL. Raises a `ShoalError`."""
    async with RewardService(config, log) as service:  # before it listens: what cannot start ends the command
        await serve_app(RewardServer(service, token=token).app, host, port, announce)
