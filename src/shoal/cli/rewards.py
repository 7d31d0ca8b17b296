"""`shoal rewards` serves scores to runs on other machines."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="rewards", help="Score answers for runs on other machines.", no_args_is_help=True)


@app.callback()
def rewards() -> None:
    """Score answers for runs on other machines."""


@app.command()
def serve(
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
    from shoal.run.serve_rewards import serve_rewards

    token = os.environ.get(TOKEN_VARIABLE, "")
    if not is_loopback(host) and not token:
        raise ConfigError(f"host: {host} can be reached by others; set {TOKEN_VARIABLE} to a token that they must have")

    def announce(url: str) -> None:
        print(url)
        sys.stdout.flush()

    config = RewardConfig(workers=workers or cores(), timeout_s=timeout_s)
    uvloop.run(serve_rewards(config, host=host, port=port, token=token, announce=announce, log=log))
