"""What `shoal view` costs: to open, to filter, in memory, and to the run that it watches.

open_s        from the command to the overview, with its charts' numbers, of a run of 30,000 rollouts (2,000 quick)
indexed_s     until all of its rollouts can be filtered
filter_s      the slowest of four filtered lists of rollouts, a text among them; the median of three askings each
rss_mb        memory of the viewer after that
million_*     the same of a run of 1,000,000 rollouts (20,000 quick): open_s is until the overview and the first list
run_slowdown  time of a busy process's steps while the viewer follows its log, over the time without; both on the
              same machine in turns, median of the pairs
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from urllib.request import urlopen

import psutil

from benchmarks import Report, say
from benchmarks.growth import META, group
from benchmarks.processes import announced
from benchmarks.view_run import write_run
from shoal.experience.buffer import Buffer
from shoal.observe.metrics import JsonlTracker

PATHS = ("/rollouts?sort=worst", "/rollouts?reward_from=1&sort=newest", "/rollouts?step=7", "/rollouts?text=%3D%20no")
PAIRS, STEPS_OF_A_PAIR = 5, 40


async def steps(buffer: Buffer, tracker: JsonlTracker, first: int, count: int) -> None:
    """Steps of a run: groups admitted, committed, taken and consumed, and their numbers written."""
    for step in range(first, first + count):
        names = [f"g{step}-{i}" for i in range(META.groups_per_step)]
        for name in names:
            await buffer.admit(name, "chain_sum")
            await buffer.add(group(name, step))
        await buffer.take(len(names), step)
        await buffer.consumed(step, step, names, version_after=step + 1)
        buffer.on_loaded(step + 1)
        tracker.log(step + 1, {"reward": step % 7 / 7, "tokens_per_s": 100.0, "engine_busy": 0.9, "trainer_busy": 0.5})


@contextmanager
def viewer(run_dir: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of a viewer as a user starts it."""
    with announced(["-m", "shoal.cli", "view", str(run_dir), "--no-open"]) as (url, pid):
        yield url, psutil.Process(pid)


def fetched(url: str) -> str:
    """The text of a page, however long it takes."""
    with urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def wait_until_read(url: str, rollouts: int) -> None:
    """Returns when as many rollouts can be filtered."""
    while "still being read" in (page := fetched(f"{url}/rollouts")) or f"{rollouts:,} of" not in page:
        time.sleep(0.1)


def seconds(url: str) -> float:
    """How long a page takes: the median of three askings."""
    taken = []
    for _ in range(3):
        began_s = time.perf_counter()
        fetched(url)
        taken.append(time.perf_counter() - began_s)
    return median(taken)


def measure(quick: bool) -> Report:
    """The figures of the module's head."""
    rollouts = 2_000 if quick else 30_000
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(_measured(Path(folder) / "run", rollouts))
        return {**figures, **_of_a_million(Path(folder) / "million", 20_000 if quick else 1_000_000)}


def _of_a_million(run_dir: Path, rollouts: int) -> Report:
    count = write_run(run_dir, rollouts)
    say(f"a run of {count:,} rollouts is made")
    began_s = time.perf_counter()
    with viewer(run_dir) as (url, process):
        for path in ("/", "/charts/overview", "/rollouts"):
            fetched(url + path)
        open_s, opened_mb = time.perf_counter() - began_s, process.memory_info().rss / 1e6
        wait_until_read(url, count)
        indexed_s = time.perf_counter() - began_s
        filter_s = max(seconds(url + path) for path in PATHS[:3])
        rss_mb = process.memory_info().rss / 1e6
    return {
        "million_rollouts": count,
        "million_open_s": round(open_s, 3),
        "million_open_mb": round(opened_mb, 1),
        "million_indexed_s": round(indexed_s, 3),
        "million_filter_s": round(filter_s, 3),
        "million_rss_mb": round(rss_mb, 1),
    }


async def _measured(run_dir: Path, rollouts: int) -> Report:
    buffer = Buffer.open(run_dir, META, max_running=64)
    tracker = JsonlTracker(run_dir / "metrics.jsonl")
    count = rollouts // (2 * META.groups_per_step)
    await steps(buffer, tracker, 0, count)
    say(f"a run of {count} steps is made")
    began_s = time.perf_counter()
    with viewer(run_dir) as (url, process):
        fetched(url)
        fetched(f"{url}/charts/overview")
        open_s = time.perf_counter() - began_s
        wait_until_read(url, rollouts)
        indexed_s = time.perf_counter() - began_s
        filter_s = max(seconds(url + path) for path in PATHS)
        rss_mb = process.memory_info().rss / 1e6
    say("the run is written on, with a viewer and without")
    ratios = []
    for pair in range(PAIRS):
        first = count + 2 * pair * STEPS_OF_A_PAIR
        with viewer(run_dir) as (url, _):
            wait_until_read(url, rollouts + 2 * META.groups_per_step * 2 * pair * STEPS_OF_A_PAIR)
            watched_s = await _timed(buffer, tracker, first, url)
        ratios.append(watched_s / await _timed(buffer, tracker, first + STEPS_OF_A_PAIR, ""))
    tracker.close()
    await buffer.close()
    return {
        "rollouts": rollouts,
        "open_s": round(open_s, 3),
        "indexed_s": round(indexed_s, 3),
        "filter_s": round(filter_s, 3),
        "rss_mb": round(rss_mb, 1),
        "run_slowdown": round(median(ratios), 3),
    }


async def _timed(buffer: Buffer, tracker: JsonlTracker, first: int, url: str) -> float:
    """Seconds for some steps, each with as much computing as a quick step has; a viewer is asked as its page asks."""
    began_s = time.perf_counter()
    for step in range(first, first + STEPS_OF_A_PAIR):
        if url and step % 10 == 0:
            asking = asyncio.to_thread(fetched, f"{url}/charts/overview")
            task = asyncio.create_task(asking)
        await steps(buffer, tracker, step, 1)
        await asyncio.to_thread(_compute)
        if url and step % 10 == 9:
            await task
    return time.perf_counter() - began_s


def _compute() -> None:
    until_s = time.thread_time() + 0.1
    while time.thread_time() < until_s:
        pass
