"""`shoal rewards serve` and `shoal task serve` work for runs from processes, or machines, of their own."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

rewards = typer.Typer(name="rewards", help="Score answers for runs on other machines.", no_args_is_help=True)
tasks = typer.Typer(name="task", help="Serve tasks to a run from processes of their own.", no_args_is_help=True)


@rewards.command("serve")
def serve_rewards(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8100,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes, and sandboxes at once; one per core.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.01, help="Deadline of one score, queueing not counted.")] = 5.0,
    log: Annotated[Path, typer.Option(help="File for the output of worker processes that cannot start.")] = Path(
        os.devnull
    ),
) -> None:
    """Score over HTTP; runs use it with reward.urls. SHOAL_REWARDS_TOKEN, where set, is required of every client."""
    import uvloop

    from shoal.config import RewardConfig
    from shoal.errors import ConfigError
    from shoal.net.listening import is_loopback
    from shoal.net.process import cores
    from shoal.reward.service import TOKEN_VARIABLE
    from shoal.run.serve_rewards import serve_rewards as serve

    token = os.environ.get(TOKEN_VARIABLE, "")
    if not is_loopback(host) and not token:
        raise ConfigError(f"host: {host} can be reached by others; set {TOKEN_VARIABLE} to a token that they must have")
    config = RewardConfig(workers=workers or cores(), timeout_s=timeout_s)
    uvloop.run(serve(config, host=host, port=port, token=token, announce=partial(print, flush=True), log=log))


@tasks.command("serve")
def serve_task(
    task: Annotated[str, typer.Argument(metavar="MODULE:TASK", help="As in `import`, from this folder too.")],
    orchestrator: Annotated[str, typer.Option(metavar="URL", help="Where the run says that tasks register.")],
    name: Annotated[str | None, typer.Option(help="As the run calls it; the task's own name when unset.")] = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="Rollouts at once; the task's own when unset.")] = None,
) -> None:
    """Draw, roll out and score a task for a run, until stopped. SHOAL_TASKS_TOKEN is the run's token, if any."""
    from shoal.tasks.remote_protocol import TOKEN_VARIABLE
    from shoal.tasks.remote_worker import RemoteWorker
    from shoal.tasks.sdk import definition_at

    served = definition_at(task)
    served = dataclasses.replace(served, name=name or served.name, max_running=max_running or served.max_running)

    async def serving() -> None:
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        joined = partial(print, f"{served.name} {served.version} serves {orchestrator}", flush=True)
        waits = partial(print, f"{served.name} waits for a run at {orchestrator}", flush=True)
        await RemoteWorker(served, orchestrator, token=os.environ.get(TOKEN_VARIABLE, "")).run(joined, waits)

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serving())
