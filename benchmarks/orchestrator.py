"""How many rollouts one orchestrator keeps under way, and what one costs: `shoal bench orchestrator`.

Three processes serve tasks whose rollouts ask the model once, over HTTP, and then take 18 to 28 s, as agents do that
run tools. One process has the registry, the gateway with an engine that echoes, sessions, ratios and the log on the
disk: all that a run has but the trainer. Once so many run at once, time and memory are taken while some finish.

    concurrent                 the least that services had under way at once while it was measured
    lost                       rollouts that failed, groups that are not accounted for or came twice
    overhead_us_per_rollout    time of the orchestrating process's core for each rollout that finished: registry, two
                               requests, session, ledger, ratios, log
    bytes_per_rollout          memory of that process for each rollout that is under way
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.crew import Crew, Load, Process, orchestrated, until
from shoal.experience.audit import audit
from shoal.net.collection import collect_rarely

Report = dict[str, object]
NAMES = ("north", "east", "west")


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a measurement."""

    task: str
    concurrent: int
    finished: int
    """Rollouts that finish during the measurement."""


FULL = Size("Patient", 5000, 12_000)
QUICK = Size("Fast", 60, 200)
GROUP_SIZE = 8
SPARE = 2.2
"""Groups allowed at once, relative to the wanted number: a group's first rollouts wait for its last."""


def measure(quick: bool) -> Report:
    """Measures the figures of the module's text."""
    import uvloop

    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(_measured(QUICK if quick else FULL, Path(folder) / "run"))


async def _measured(size: Size, run_dir: Path) -> Report:
    groups = int(SPARE * size.concurrent / GROUP_SIZE) + 1
    load = Load(
        dict.fromkeys(NAMES, 1.0),
        groups_per_step=8,
        max_staleness=groups // 4
        + 8,  # `max_running` is the limit: there is room for groups that wait for another task's
        max_running=groups,
        group_size=GROUP_SIZE,
        engine_s=(0.1, 0.3),
        timeout_s=600.0,
    )
    paths = [(name, f"benchmarks.service_tasks:{size.task}") for name in NAMES]
    async with orchestrated(load, paths, run_dir) as (crew, processes):
        collect_rarely()
        idle_bytes = psutil.Process().memory_info().rss
        training = asyncio.create_task(crew.train(1 << 40))
        await until(lambda: crew.running >= size.concurrent)
        figures = await _steady(crew, processes, size, idle_bytes)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
    result = audit(run_dir)
    unaccounted = sum(len(finding.ids) for finding in result.findings.values())
    lost = crew.rollouts["failed"] + unaccounted + len(crew.ids) - len(set(crew.ids))
    return {**figures, "lost": lost, "rollouts": crew.rollouts.total(), "trained_groups": len(crew.ids)}


async def _steady(crew: Crew, processes: list[Process], size: Size, idle_bytes: int) -> Report:
    """Measures while the wanted number of rollouts runs all the time."""
    this, others = psutil.Process(), [psutil.Process(process.pid) for process in processes]

    def finished() -> int:
        return sum(crew.finished(name) for name in NAMES)

    before, own_s, others_s = finished(), _cpu_s([this]), _cpu_s(others)
    began_s, least, peak_bytes = time.perf_counter(), crew.running, 0

    def enough() -> bool:
        nonlocal least, peak_bytes
        least, peak_bytes = min(least, crew.running), max(peak_bytes, this.memory_info().rss)
        return finished() - before >= size.finished

    await until(enough, 0.05)
    done, seconds = finished() - before, time.perf_counter() - began_s
    return {
        "concurrent": least,
        "overhead_us_per_rollout": 1e6 * (_cpu_s([this]) - own_s) / done,
        "bytes_per_rollout": (peak_bytes - idle_bytes) / crew.running,
        "service_us_per_rollout": 1e6 * (_cpu_s(others) - others_s) / done,
        "rollouts_per_s": done / seconds,
        "orchestrator_busy": (_cpu_s([this]) - own_s) / seconds,
    }


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)
