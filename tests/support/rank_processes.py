"""Ranks of a test as processes that begin with torch and the trainer imported, which takes each 3 s otherwise."""

import multiprocessing
from collections.abc import Callable

from torch.multiprocessing import start_processes


def run_ranks(work: Callable[..., None], arguments: tuple[object, ...], count: int) -> None:
    """Calls `work(rank, *arguments)` in `count` processes; returns when all have ended. Raises what one of them did."""
    multiprocessing.set_forkserver_preload(["shoal.trainer.trainer"])
    start_processes(work, arguments, nprocs=count, start_method="forkserver")
