"""The flag `--view`: a separate process serves the page of a run while it trains."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, TypeAlias

import typer

ViewFlag: TypeAlias = Annotated[
    bool, typer.Option("--view", help="Show the run on a page, as `shoal view` does, while it trains.")
]


@contextmanager
def page_beside(run_dir: str, wanted: bool) -> Iterator[None]:
    """Serves the page of a run that is about to start: in a terminal until Ctrl-C, otherwise until the run ends."""
    if not wanted:
        yield
        return
    command = [sys.executable, "-m", "shoal.cli", "view", run_dir, "--attached"]
    # A separate session: Ctrl-C must end the run first, so that the page shows how it ended.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            if address := process.stdout.readline().strip():
                print(f"page: {address}", file=sys.stderr)
            yield
            if address and sys.stderr.isatty():
                print(f"the page stays until Ctrl-C, and comes back with: shoal view {run_dir}", file=sys.stderr)
                with suppress(KeyboardInterrupt):
                    process.wait()
        finally:
            process.terminate()
