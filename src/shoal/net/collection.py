"""When Python collects garbage: not during imports, and rarely where an event loop must not pause."""

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

UNUSED_BY_MODELS: Final = ("scipy",)
"""Packages that transformers imports where they are installed; for a loss of object detection, in .25 s."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Context manager for imports: no garbage collection within.

    A quarter of the time that torch and transformers take to import goes into collections that find nothing.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def loading(*, hidden: Iterable[str] = ()) -> Iterator[None]:
    """Context manager for imports and long-lived objects: no garbage collection within, nor of these objects later.

    Packages that are `hidden` cannot be imported within, and libraries that could use them do without.
    """
    absent: dict[str, Any] = {name: None for name in hidden if name not in sys.modules}
    sys.modules.update(absent)
    try:
        with uncollected():
            yield
            gc.freeze()
    finally:
        for name in absent:
            sys.modules.pop(name, None)


def collect_rarely() -> None:
    """Makes garbage collection rare, for a process whose event loop must not pause.

    By default Python scans the objects that requests leave behind, down to every token id, again and again. With a
    thousand open conversations the scans block the loop 2.5 % of the time, for 20 to 100 ms each.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
