"""A panel that stays in place on a terminal, and is painted anew when the terminal's size changes."""

import os
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live

REFRESHES_PER_S = 4
"""A start without records still shows the seconds passing."""


class ResizableLive(Live):
    """rich's `Live`, which counts the lines to paint over: a terminal that became narrower has broken them into more.

    The screen is therefore cleared when its size has changed; what scrolled off it stays.
    """

    def __init__(self, stream: TextIO, panel: Callable[[], RenderableType]) -> None:
        self._fd = stream.fileno()
        console = Console(file=stream)
        super().__init__(console=console, get_renderable=panel, refresh_per_second=REFRESHES_PER_S)
        self._resized()

    def refresh(self) -> None:
        """Paints the panel; on a screen of another size than before, on a clear one."""
        if self._resized() and self.is_started:
            self.console.clear()
        super().refresh()

    def _resized(self) -> bool:
        """Takes over the terminal's own size, where rich asks the standard streams. Returns True if it is new."""
        size = ConsoleDimensions(*os.get_terminal_size(self._fd))
        if not all(size) or size == self.console.size:
            return False
        self.console.size = size
        return True
