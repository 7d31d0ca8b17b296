"""Environment of another process, as the kernel tells it."""

import os
import time
from pathlib import Path

PATIENCE_S = 60.0


def environment_of(pid: int) -> dict[str, str]:
    """Variables with which a process was started; between `exec` and its first instruction the kernel tells none."""
    deadline = time.monotonic() + PATIENCE_S
    while not (told := Path(f"/proc/{pid}/environ").read_text()):
        assert time.monotonic() < deadline, f"process {pid} has no environment"
        os.sched_yield()
    return dict(one.split("=", 1) for one in told.rstrip("\0").split("\0"))
