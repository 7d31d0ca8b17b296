"""Processes that benches and experiments start: a command of Shoal, a server, or a bench in a process of its own."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from benchmarks import Report, child_environment
from shoal.errors import ShoalError
from shoal.net.process import PARENT

SHOAL = (
    "-c",
    # a shell has its background ignore SIGINT
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from shoal.net.process import die_with_parent; die_with_parent(); from shoal.cli import main; main()",
)
"""Arguments of Python for a command of Shoal that ends with this process."""


def commit() -> str:
    """The short hash of the code that runs, for raw data; "" outside of a clone."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


async def started(arguments: Sequence[str], log: Path | None, prefix: Sequence[str] = ()) -> asyncio.subprocess.Process:
    """Starts Python with some arguments; it writes to the end of `log`, or its output comes to this process."""
    with nullcontext() if log is None else log.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            *(*prefix, sys.executable, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file or asyncio.subprocess.PIPE,
            stderr=file,
            env={**child_environment(), PARENT: str(os.getpid())},
        )


@contextmanager
def announced(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[tuple[str, int]]:
    """The first line that a server in Python prints, mostly its address, and its process id. Leaving ends it.

    Raises `ShoalError` for a server that ends without a line.
    """
    given = {**child_environment(), **(environment or {})}
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=given) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line:
                raise ShoalError(f"{' '.join(arguments[:4])} ended before it said anything")
            yield line, process.pid
        finally:
            process.terminate()


def reported(command: Sequence[str], what: str, environment: Mapping[str, str] | None = None) -> Report:
    """The JSON object in the last line that a command prints. Raises `ShoalError` that names it if it fails."""
    given = child_environment() if environment is None else environment
    done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ShoalError(f"{what} ended with code {done.returncode}")
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report
