"""Who waits for whom, on demand: `kill -USR1 PID` has a run write a line per task to its standard error."""

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.clock import waits


@contextmanager
def telling_waits() -> Iterator[None]:
    """Answers SIGUSR1 while it is open. Outside of the main thread signals do not arrive, so there it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: sys.stderr.write("\n".join(waits(loop)) + "\n"))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
