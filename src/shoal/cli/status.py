"""`shoal status` shows a run's state."""

import json
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import JsonFlag


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    json_: JsonFlag = False,
) -> None:
    """Show a run's state, task by task: groups running, waiting, trained, failed or dropped, with reasons."""
    from shoal.observe.status import status as status_of
    from shoal.observe.status import status_lines

    values = status_of(run)
    print(json.dumps(values) if json_ else "\n".join(status_lines(values)))
