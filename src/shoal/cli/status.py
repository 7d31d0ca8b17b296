"""`shoal status`: where a run stands."""

import json
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import JsonFlag


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    json_: JsonFlag = False,
) -> None:
    """Say where a run stands, task by task: what runs, waits, was trained, failed or was dropped, and why."""
    from shoal.observe.status import status as status_of
    from shoal.observe.status import status_lines

    values = status_of(run)
    print(json.dumps(values) if json_ else "\n".join(status_lines(values)))
