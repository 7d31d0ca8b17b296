"""A panel that stays in place on a terminal and is repainted when the terminal is resized."""

import os
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live

REFRESHES_PER_S = 4
"""Often enough that the seconds advance during a start, before the first record."""


class ResizableLive(Live):
    """rich's `Live` that clears the screen on a resize; the scrollback stays.

    `Live` counts the lines to paint over, and a narrower terminal wraps them into more.
    """

    def __init__(self, stream: TextIO, panel: Callable[[], RenderableType]) -> None:
        self._fd = stream.fileno()
        console = Console(file=stream)
        super().__init__(console=console, get_renderable=panel, refresh_per_second=REFRESHES_PER_S)
        self._resized()

    def refresh(self) -> None:
        """Paints the panel; after a resize it clears the screen first."""
        with self._lock:  # rich's thread paints too, and would clear a second time
            if self._resized() and self.is_started:
                self.console.clear()
            super().refresh()

    def _resized(self) -> bool:
        """Reads the size of this terminal; rich would ask the standard streams. Returns True if it changed."""
        size = ConsoleDimensions(*os.get_terminal_size(self._fd))
        if not all(size) or size == self.console.size:
            return False
        self.console.size = size
        return True
