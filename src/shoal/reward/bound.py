"""A bound on the processor time of one judgement, for worker processes.

A bound on wall time would fail right answers on a busy machine. A judgement may ignore the signal, in one long
multiplication of C for instance. The kernel then kills it with its process a second or two later.
"""

import math
import resource
import signal
import time
from collections.abc import Callable

AGAIN_S = 0.1
"""Seconds until the next signal: some scorers catch every exception."""


class OutOfTime(BaseException):
    """Raised in the middle of a judgement; no `except Exception` of a library catches it."""


def within(cpu_s: float, judge: Callable[[str], tuple[float, str]], answer: str) -> tuple[float, str]:
    """Runs a judgement. Raises `OutOfTime` when it takes more processor time, and any error of `judge`."""
    armed = True

    def stop(*_: object) -> None:
        if armed:
            raise OutOfTime

    _, hardest = resource.getrlimit(resource.RLIMIT_CPU)
    signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + cpu_s) + 1, hardest))
    signal.setitimer(signal.ITIMER_PROF, cpu_s, AGAIN_S)
    try:
        return judge(answer)
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (hardest, hardest))
