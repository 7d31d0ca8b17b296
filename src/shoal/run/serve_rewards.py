"""`shoal rewards serve` runs a scorer for runs on other machines."""

from collections.abc import Callable
from pathlib import Path

from shoal.config import RewardConfig
from shoal.net.server import serving, until_cancelled
from shoal.reward.server import RewardServer
from shoal.reward.service import RewardService


async def serve_rewards(
    config: RewardConfig, *, host: str, port: int, token: str, announce: Callable[[str], None], log: Path
) -> None:
    """Scores until it is cancelled. `announce` gets the URL. Raises a `ShoalError`."""
    async with (
        RewardService(config, log) as service,  # before it listens: a failed start ends the command
        serving(RewardServer(service, token=token).app, host, port) as url,
    ):
        announce(url)
        await until_cancelled()
