"""`shoal rewards serve --run RUN_URL`: a scorer of this host, for a run of another."""

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.cluster.registry import OtherRun, RewardsRole, first_info, run_info
from shoal.config import RewardConfig
from shoal.net.client import Client
from shoal.net.joining import hold_lease
from shoal.net.listening import own_address, tls_files
from shoal.net.server import serving
from shoal.reward.server import RewardServer
from shoal.reward.service import RewardService


@dataclass(frozen=True, slots=True)
class RewardsHost:
    """Options of `shoal rewards serve --run`."""

    url: str
    token: str
    config: RewardConfig
    log: Path

    async def run(self, announce: Callable[[str], None]) -> None:
        """Scores until it is cancelled, for one run after another at the same URL. Raises a `ShoalError`."""
        token = secrets.token_urlsafe(24)
        async with RewardService(self.config, self.log) as service:
            app = RewardServer(service, token=token).app
            async with serving(app, own_address(self.url), tls=tls_files(), grace_s=1) as url:
                while True:
                    await self._lease(RewardsRole(url, token), announce)

    async def _lease(self, role: RewardsRole, announce: Callable[[str], None]) -> None:
        """Holds the lease of one run."""
        client = Client(self.url, token=self.token)
        try:
            info = await first_info(client, announce)
        finally:
            await client.aclose()
        with suppress(OtherRun):
            check = partial(run_info, key=info.key)
            await hold_lease(self.url, self.token, role, announce, check=check)
