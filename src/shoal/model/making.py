"""Reports the progress of making a model on standard error."""

import sys
import threading
import time
from types import TracebackType
from typing import Self, TextIO

ON_TERMINAL_S, ELSEWHERE_S = 0.5, 5.0
"""Seconds between two lines; those on a terminal replace each other."""


class Making:
    """Teller of the phase that a making is in, and of its seconds; a thread repeats it while a phase lasts."""

    def __init__(self, what: str, *, stream: TextIO | None = None, every_s: float | None = None) -> None:
        self._what, self._stream = what, stream or sys.stderr
        self._in_place = self._stream.isatty()
        self._every_s = every_s or (ON_TERMINAL_S if self._in_place else ELSEWHERE_S)
        self._phase = "starting"
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._repeat, daemon=True, name="telling progress")

    def __enter__(self) -> Self:
        self.tell("starting")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._in_place:
            self._stream.write("\n")

    def now(self, phase: str) -> None:
        """Sets the phase, which the next line shows."""
        self._phase = phase

    def tell(self, phase: str) -> None:
        """Sets the phase and shows it at once."""
        self.now(phase)
        self._line()

    def _repeat(self) -> None:
        while not self._ended.wait(self._every_s):
            self._line()

    def _line(self) -> None:
        text = f"{self._what} (once): {self._phase}, {time.monotonic() - self._began_s:.0f} s"
        with self._telling:
            self._stream.write(f"\r\x1b[K{text}" if self._in_place else f"{text}\n")
            self._stream.flush()
