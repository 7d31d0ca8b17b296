"""A run joins a swarm as a node, with exchange, identity and its own tasks; without servers it has none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from shoal.config import Config
from shoal.experience.log import external_groups, snapshot
from shoal.interfaces import Exchange, Scorer
from shoal.run.assemble_rollouts import own_scorer
from shoal.run.plan import Prepared
from shoal.swarm.claim_verification import DrawBounds, OwnTasks
from shoal.swarm.identity import Identity
from shoal.swarm.node import Node, NodeDeps
from shoal.swarm.options import options_of
from shoal.tasks.mixture import Mixture

FOLDER = "swarm"
"""Folder in a run directory for identity, ban list and status."""
MOST_REMEMBERED = 16_384
"""External groups that a resumed run remembers as trained."""


@asynccontextmanager
async def swarm_node(
    config: Config, prepared: Prepared, run_dir: Path, scorer: Scorer, exchange: Exchange | None, *, apart: bool
) -> AsyncIterator[Node | None]:
    """Opens the node of a run; None outside of swarms. `exchange` replaces the servers. Raises a `ShoalError`.

    The run's log is open by now. `scorer` is the run's. Peers' answers scored `apart` have a worker process of their
    own, so a hanging answer of a peer delays no answer of the run.
    """
    settings = config.swarm
    if exchange is None and not settings.servers:
        yield None
        return
    async with AsyncExitStack() as stack:
        if exchange is None:
            from shoal.swarm.nats import NatsExchange

            options = options_of(settings.servers, settings.name)
            exchange = await stack.enter_async_context(NatsExchange(options))
        folder = run_dir / FOLDER
        identity = Identity.load(folder / "identity.pem")
        service = prepared.service
        datasets = settings.datasets if isinstance(settings.datasets, str) else tuple(settings.datasets)
        bounds = DrawBounds(datasets, settings.draw_s, settings.draw_characters)
        own = OwnTasks(service.services if isinstance(service, Mixture) else [service], bounds)
        stack.callback(own.close)
        await asyncio.to_thread(own.check)
        if apart and settings.external_groups:
            alone = config.model_copy(update={"reward": config.reward.model_copy(update={"workers": 1})})
            scorer = await stack.enter_async_context(own_scorer(alone, prepared, run_dir / "logs" / "peers.log"))
        deps = NodeDeps(
            exchange,
            own,
            prepared.renderer,
            scorer,
            prepared.max_model_len,
            Path(config.model.path).name or "model",
            max(config.rollout.group_size, 2),
            config.train.groups_per_step,
        )
        with snapshot(run_dir) as log:
            trained = external_groups(log, MOST_REMEMBERED)
        yield Node(deps, settings, identity, folder, seed=config.seed, trained=trained)
