"""A run lists its waits on demand: after `kill -USR1 PID` it writes a line per task to standard error."""

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.clock import waits


@contextmanager
def report_waits() -> Iterator[None]:
    """Answers SIGUSR1 within the block. Signals reach the main thread only, so elsewhere it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: sys.stderr.write("\n".join(waits(loop)) + "\n"))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
