"""Prints a JSON object with what every reasoning-gym dataset gives; run as a program by test_tasks_procedural.

`receipts` draws by receipt, `fresh` from newly constructed datasets and in the opposite order, `levels` at the
lowest level of their curricula.
"""

import contextlib
import io
import json
import random
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import numpy as np
from reasoning_gym import create_dataset, factory

from shoal import procedural
from shoal.errors import TaskError
from shoal.types import Receipt

PLACES = {7: 0, 2**31 - 1: 3}
"""Index of the item that is drawn under each seed."""
GUARD_S = 6
ENDLESS = ("sokoban",)
"""Data sets that draw for a quarter of a minute at their lowest level, and swallow what would end them."""


def digest(item: dict[str, object]) -> list[str]:
    return [str(item["question"]), repr(item["answer"]), repr(item["metadata"])]


def by_receipt(name: str, seed: int) -> list[str]:
    return digest(procedural.entry_of(Receipt(name, procedural.VERSION, "{}", seed, PLACES[seed])).item)


def fresh(name: str, seed: int) -> list[str]:
    index = PLACES[seed]
    dataset = create_dataset(name, seed=seed, size=index + 1)
    random.seed(seed + index)
    np.random.seed((seed + index) % 2**32)
    return digest(dataset[index])


def at_level(name: str, level: int) -> list[str]:
    config = procedural.config_json(name, {}, level)
    return [procedural.entry_of(Receipt(name, procedural.VERSION, config, 7, 0)).question]


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Ends a draw that does not end by itself with a `TimeoutError`.

    By CPU time: on a busy machine a slow one is not endless, and one that swallows the error draws something else.
    """
    signal.signal(signal.SIGVTALRM, _late)
    signal.setitimer(signal.ITIMER_VIRTUAL, GUARD_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _late(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"nothing came within {GUARD_S} s of computing")


def drawn(draw: Callable[[str, int], list[str]], name: str, which: int) -> list[str]:
    try:
        with guarded():
            return draw(name, which)
    except (TaskError, TimeoutError) as error:
        return ["error", str(error)]


def main(mode: str) -> None:
    names = procedural.names()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):  # bf and codeio print
        if mode == "receipts":
            entries = {f"{name} {seed}": drawn(by_receipt, name, seed) for seed in PLACES for name in names}
        elif mode == "fresh":
            entries = {
                f"{name} {seed}": drawn(fresh, name, seed) for name in reversed(names) for seed in reversed(PLACES)
            }
        else:
            drawable = (name for name in names if factory.has_curriculum(name) and name not in ENDLESS)
            entries = {name: drawn(at_level, name, 0) for name in drawable}
    print(json.dumps(entries))


if __name__ == "__main__":
    main(sys.argv[1])
