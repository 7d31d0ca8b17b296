"""`shoal view` shows runs on a page."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def view(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Run directories; the newest under runs/ when none.")
    ] = None,
    host: Annotated[str, typer.Option(help="Beyond loopback the address that is printed has a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
) -> None:
    """Watch runs on a page: curves, rollouts, tokens, waits. Run directories are only read."""
    import webbrowser

    import uvloop

    from shoal.observe.view.runs import newest_run
    from shoal.observe.view.server import serve_view

    def announce(url: str) -> None:
        print(url)
        sys.stdout.flush()
        if not no_open:
            webbrowser.open(url)

    uvloop.run(serve_view(runs or [newest_run(Path("runs"))], host=host, port=port, announce=announce))
