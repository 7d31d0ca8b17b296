"""Freed memory of a process, given back to the system.

glibc keeps freed memory for the next tensors (`net.process.torch_environment`). Micro-batches of ever new lengths leave
holes in it that later tensors do not fit. So the trainer of SmolLM2 grew by 85 MB a step, from 3.7 GB.
"""

import ctypes
import os
from pathlib import Path
from typing import Final

GROWN: Final = 1.15
"""Growth of the resident memory after which holes are given back. The next step takes some of it again, and 15 %
longer, so not every step may do it."""
SETTLED: Final = 2
"""Steps after which a process has all that it keeps."""
_TRIM: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Gives all freed memory back; does nothing without glibc."""
    if _TRIM is not None:
        _TRIM(0)


class Heap:
    """The heap of this process; does nothing without glibc."""

    def __init__(self) -> None:
        self._steps = 0
        self._usual_bytes = 0

    def settle(self) -> None:
        """Gives holes back if the process has grown since its first steps, or since the step after the last time.

        Call it after each step. The first one always leaves holes: it makes moments above its activations.
        """
        if _TRIM is None:
            return
        self._steps += 1
        if self._steps == 1:
            give_back()
        elif self._steps <= SETTLED:
            self._usual_bytes = resident_bytes()
        elif resident_bytes() > GROWN * self._usual_bytes:
            give_back()
            self._steps = SETTLED - 1


def resident_bytes() -> int:
    """Memory of this process that is in use or kept, on Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
