"""Three services in processes of their own, killed and started again in turn: `make services`, and shortened as a test.

Prints one JSON object: the trained mix, and by how much of its target the share furthest from it is off; how long after
each kill work flowed again; and what the audit of the log says.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.crew import Crew, Load, Process, orchestrated, until
from shoal.experience.audit import audit

NAMES = ("fast", "slow", "flaky")


async def run(groups: int, run_dir: Path, *, kills: int = 3) -> dict[str, object]:
    """Trains `groups` groups; each of the first `kills` services is killed once on the way."""
    load = Load(dict.fromkeys(NAMES, 1.0), groups_per_step=6, max_staleness=4, max_running=128)
    paths = [(name, f"benchmarks.service_tasks:{name.capitalize()}") for name in NAMES]
    recovered_s: dict[str, float] = {}
    began_s = time.monotonic()
    async with orchestrated(load, paths, run_dir) as (crew, processes):
        training = asyncio.create_task(crew.train(groups))
        for kill in range(kills):
            name, enough = NAMES[kill], groups * (kill + 1) / (kills + 1) - 6
            await until(lambda enough=enough: len(crew.ids) >= enough)
            recovered_s[name] = await killed(crew, processes[kill], name)
        await training
        counts = {name: dict(crew.task_server.services[name].counts) for name in NAMES}
    result = audit(run_dir)
    mix = {name: crew.trained[name] / crew.trained.total() for name in NAMES}
    return {
        "groups": crew.trained.total(),
        "mix": mix,
        "off_target": max(abs(share * len(NAMES) - 1) for share in mix.values()),
        "recovered_s": recovered_s,
        "doubled": len(crew.ids) - len(set(crew.ids)),
        "audit_ok": result.ok,
        "audit": list(result.sentences()),
        "rollouts": dict(crew.rollouts),
        "jobs": counts,
        "seconds": time.monotonic() - began_s,
    }


async def killed(crew: Crew, process: Process, name: str) -> float:
    """Kills a service with work in flight and starts it again; seconds until it handed in a rollout."""
    await until(lambda: crew.task_server.status_of(name)["running"], 0.001)
    began_s = time.monotonic()
    process.kill()
    before = crew.finished(name)
    await asyncio.sleep(0.2)
    process.start()
    await until(lambda: crew.finished(name) > before)
    return time.monotonic() - began_s


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(run(int(sys.argv[1]), Path(folder) / "run")), indent=1))
