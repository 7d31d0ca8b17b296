"""`shoal task` runs tasks in processes of their own."""

import contextlib
import dataclasses
import os
import signal
import sys
from typing import Annotated

import typer

app = typer.Typer(name="task", help="Serve tasks to a run from processes of their own.", no_args_is_help=True)


@app.callback()
def tasks() -> None:
    """Serve tasks to a run from processes of their own."""


@app.command()
def serve(
    task: Annotated[str, typer.Argument(metavar="MODULE:TASK", help="As in `import`, from this folder too.")],
    orchestrator: Annotated[str, typer.Option(metavar="URL", help="Where the run says that tasks register.")],
    name: Annotated[str | None, typer.Option(help="As the run calls it; the task's own name when unset.")] = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="Rollouts at once; the task's own when unset.")] = None,
) -> None:
    """Draw, roll out and score a task for a run, until stopped. SHOAL_TASKS_TOKEN is the run's token, if any."""
    import asyncio

    from shoal.tasks.remote_protocol import TOKEN_VARIABLE
    from shoal.tasks.remote_worker import RemoteWorker
    from shoal.tasks.sdk import definition_at

    served = definition_at(task)
    served = dataclasses.replace(served, name=name or served.name, max_running=max_running or served.max_running)

    def joined() -> None:
        print(f"{served.name} {served.version} serves {orchestrator}")
        sys.stdout.flush()

    async def serving() -> None:
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        await RemoteWorker(served, orchestrator, token=os.environ.get(TOKEN_VARIABLE, "")).run(joined)

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serving())
