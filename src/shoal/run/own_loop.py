"""A policy for a training loop of the user's own. See docs/guides/library.md."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from shoal.experience.buffer import Buffer
from shoal.interfaces import RewardFunction
from shoal.run.assemble import orchestrator, playing, serving
from shoal.run.library import TaskSource, config_of
from shoal.run.machine.devices import Threads
from shoal.run.policy import Policy, PolicyParts
from shoal.run.prepare import prepare
from shoal.run.run_dir import groups_at_once, run_meta
from shoal.run.teacher import text_teacher
from shoal.trainer.worker import TrainerProcess, local_ranks
from shoal.weights.store import WeightStore

if TYPE_CHECKING:
    from shoal.run.keywords import Settings


@asynccontextmanager
async def open_policy(
    model: str | os.PathLike[str] = "demo",
    tasks: "Sequence[TaskSource] | TaskSource | None" = None,
    reward: RewardFunction | str | None = None,
    **settings: "Unpack[Settings]",
) -> AsyncIterator[Policy]:
    """Starts an engine and a trainer with a model; arguments are those of `train`. Raises a `ShoalError`.

    >>> import asyncio, shoal
    >>> async def loop() -> None:
    ...     async with shoal.open_policy("demo", max_tokens=12) as policy:
    ...         for _ in range(10):
    ...             await policy.step(await policy.groups())
    ...             await policy.push()
    >>> asyncio.run(loop())  # doctest: +SKIP
    """
    config, threads = config_of(model, tasks, reward, **settings), Threads()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-policy-")))
        prepared = await asyncio.to_thread(stack.enter_context, prepare(config))  # its checks may run coroutines
        log = folder / "logs" / "trainer.log"
        buffer = Buffer.open(folder, run_meta(config), max_running=groups_at_once(config))
        stack.push_async_callback(buffer.close)
        async with (
            local_ranks(log, threads.trainer, config.train.ranks, prepared.devices.ranks) as ranks,
            serving(config, prepared, folder, threads=threads) as (engine, single_turn),
            playing(config, prepared, engine, single_turn) as runner,
            text_teacher(config.train, prepared.renderer) as teacher,
        ):
            trainer = TrainerProcess(ranks)
            await trainer.start(prepared.model_dir, config, threads.trainer)
            store = WeightStore(folder / "weights")
            draw = orchestrator(config, prepared, runner, buffer).run
            policy = Policy(PolicyParts(config, prepared, engine, trainer, runner, buffer, store, teacher, draw))
            async with aclosing(policy):
                yield policy
