"""The command line in a test's own process, which has loaded torch already; another process takes seconds more."""

import contextlib
import io
import subprocess
from pathlib import Path
from typing import TypeAlias

import pytest

from shoal.cli import main

Process: TypeAlias = "subprocess.CompletedProcess[str]"


def shoal(*arguments: str, cwd: Path | None = None) -> Process:
    """What a command said and how it ended; engines and trainers are processes as ever."""
    out, err, ends = io.StringIO(), io.StringIO(), pytest.raises(SystemExit)
    folder = contextlib.chdir(cwd or Path.cwd())
    with folder, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), ends as ended:
        main(arguments)
    return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), out.getvalue(), err.getvalue())
