"""Workspaces: time and size of a fork, verdicts a second, and 200 held at once while their processes are killed.

Rollouts are played by workers, which are processes with many workspaces each. SIGKILL ends one worker after another at
random times; a new worker goes on from the last snapshot of each rollout. At the end every rollout has one verdict, no
process is left, and no process has a mount of the trees.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks import Report, child_environment, say
from shoal.sandbox.program import ProgramLimits
from shoal.workspace.fork import Workspace, fork, fork_kind, sweep
from shoal.workspace.judge import HiddenTests, judge
from shoal.workspace.reports import ReportKind
from shoal.workspace.tree import Tree, tree_named, tree_of, trees_directory

SEED = 32
TURNS = 3
WORKERS = 4
PATIENT = ProgramLimits(wall_s=120.0, cpu_s=60.0, memory_bytes=1 << 30, processes=64, file_bytes=64 << 20)
HIDDEN = HiddenTests(
    ("/bin/bash", "/checks/run.sh"),
    ReportKind.EXIT_CODE,
    {"/checks/run.sh": 'test "$(cat turns.txt)" = "$(printf "turn %d\\n" 0 1 2)"\n'},
    wall_s=PATIENT.wall_s,
)


def measure(quick: bool) -> Report:
    """Figures in a cache of their own; `quick` has fewer files, workspaces and seconds."""
    files, held, seconds, forks = (500, 12, 20.0, 10) if quick else (20_000, 200, 600.0, 60)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        tree = _tree(Path(folder, "source"), files)
        say(f"a tree of {files} files is prepared")
        report: Report = {"kind": fork_kind().value, "files": files, **asyncio.run(_forks(tree, forks))}
        say(f"a fork takes {report['fork_ms']} ms")
        report |= asyncio.run(_held(tree, held))
        say(f"{held} workspaces are held")
        return report | asyncio.run(_Chaos(tree, held).figures(seconds))


def _tree(source: Path, files: int) -> Tree:
    for number in range(files):
        path = source / f"package_{number % 100}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"VALUE = {number}\n")
    return tree_of(source)


async def _forks(tree: Tree, count: int) -> Report:
    """Milliseconds of a fork until its first command has ended, of the fork alone, and of a further command."""
    whole, alone, later = [], [], []
    for _ in range(count):
        began = time.perf_counter()
        with fork(tree) as workspace:
            alone.append(time.perf_counter() - began)
            assert (await workspace.run("cat package_7/module_7.py", PATIENT)).stdout == b"VALUE = 7\n"
            whole.append(time.perf_counter() - began)
            began = time.perf_counter()
            await workspace.run("true", PATIENT)
            later.append(time.perf_counter() - began)
    names = ("fork_ms", "fork_alone_ms", "command_ms")
    return {
        name: round(1e3 * statistics.median(one), 1) for name, one in zip(names, (whole, alone, later), strict=True)
    }


async def _held(tree: Tree, count: int) -> Report:
    """Bytes of disk and memory for each of many workspaces in one process, and verdicts a second on them."""
    before = psutil.Process().memory_info().rss
    held = [fork(tree) for _ in range(count)]
    try:
        for workspace in held:
            await workspace.run("echo '# changed' >> package_1/module_1.py", PATIENT)
        rss = psutil.Process().memory_info().rss - before
        disk = [_bytes_below(workspace.folder) for workspace in held]
        judged, began = held[: max(10, count // 5)], time.perf_counter()
        await asyncio.gather(*(_failed(workspace) for workspace in judged))
        rate = len(judged) / (time.perf_counter() - began)
    finally:
        for workspace in held:
            workspace.close()
    figures = {"bytes_per_fork": round(statistics.median(disk)), "memory_bytes_per_fork": max(0, rss) // count}
    return {**figures, "verdicts_per_s": round(rate, 2)}


async def _failed(workspace: Workspace) -> None:
    assert (await judge(workspace, HIDDEN)).reward == 0.0


def _bytes_below(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


@dataclass
class _Chaos:
    """Rollouts on workers that are killed at random."""

    tree: Tree
    held: int
    verdicts: Counter[int] = field(default_factory=Counter)
    wrong: int = 0
    snapshots: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Turns that are done, and the newest snapshot, by rollout."""
    opened: dict[int, int] = field(default_factory=dict)
    """Workspaces that a worker holds, by its process."""
    resumed: int = 0
    kills: int = 0
    most_held: int = 0
    next_id: int = 0
    ending: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))

    async def figures(self, seconds: float) -> Report:
        """What came of it."""
        began = time.monotonic()
        share = -(-self.held // WORKERS)
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._place(share))
            await asyncio.sleep(seconds)
            self.ending = True
        return self._counted(time.monotonic() - began)

    def _counted(self, took_s: float) -> Report:
        """What is lost, doubled or left."""
        swept = sweep()
        once = sum(1 for count in self.verdicts.values() if count == 1)
        return {
            "held": self.most_held,
            "seconds": round(took_s),
            "kills": self.kills,
            "rollouts": self.next_id,
            "verdicts": once,
            "wrong": self.wrong,
            "lost": self.next_id - len(self.verdicts),
            "doubled": len(self.verdicts) - once,
            "resumed_from_snapshots": self.resumed,
            "leaked_processes": len(_processes_in(trees_directory())),
            "leaked_mounts": Path("/proc/self/mounts").read_text().count(str(trees_directory())),
            "swept_forks": swept,
            "forks_left": len(list((trees_directory() / "forks").iterdir())),
        }

    async def _place(self, share: int) -> None:
        """Keeps `share` rollouts running on one worker after another."""
        running: set[int] = set()
        while running or not self.ending:
            command = (sys.executable, "-m", "benchmarks.workspaces", self.tree.digest)
            worker = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment(), start_new_session=True
            )
            killing = asyncio.create_task(self._kill(worker))
            try:
                await self._work(worker, running, share)
            finally:
                killing.cancel()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                await worker.wait()
                self.opened.pop(worker.pid, None)
            sweep()

    async def _kill(self, worker: asyncio.subprocess.Process) -> None:
        await asyncio.sleep(self.rng.uniform(3.0, 45.0))
        if not self.ending and worker.returncode is None:
            self.kills += 1
            os.kill(worker.pid, signal.SIGKILL)

    async def _work(self, worker: asyncio.subprocess.Process, running: set[int], share: int) -> None:
        """Assigns rollouts and records what the worker reports, until it is killed or all is done."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        for rollout in running:
            self._assign(worker.stdin, rollout)
        while running or not self.ending:
            while len(running) < share and not self.ending:
                running.add(self.next_id)
                self._assign(worker.stdin, self.next_id)
                self.next_id += 1
            self.most_held = max(self.most_held, sum(self.opened.values()))
            line = await worker.stdout.readline()
            if not line.endswith(b"\n"):
                return
            event = json.loads(line)
            if "snapshot" in event:
                self.snapshots[event["id"]] = (event["turn"], event["snapshot"])
            elif "opened" in event:
                self.opened[worker.pid] = event["opened"]
            else:
                self.verdicts[event["id"]] += 1
                self.wrong += event["reward"] != 1.0
                running.discard(event["id"])

    def _assign(self, stdin: asyncio.StreamWriter, rollout: int) -> None:
        turn, snapshot = self.snapshots.get(rollout, (0, self.tree.digest))
        self.resumed += turn > 0
        stdin.write(json.dumps({"id": rollout, "turn": turn, "tree": snapshot}).encode() + b"\n")


def _processes_in(folder: Path) -> list[int]:
    """Processes with a mount of a folder's trees."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if str(folder) in Path(f"/proc/{pid}/mountinfo").read_text():
                found.append(int(pid))
        except OSError:
            continue
    return found


class _Worker:
    """Plays the rollouts that standard input names; all of them hold a workspace while they wait for a turn."""

    def __init__(self) -> None:
        self.open = 0
        self.places = asyncio.Semaphore(2)

    async def serve(self) -> None:
        """Plays until standard input ends."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async with asyncio.TaskGroup() as group:
            while line := await reader.readline():
                group.create_task(self._play(**json.loads(line)))

    async def _play(self, id: int, turn: int, tree: str) -> None:
        with fork(tree_named(tree)) as workspace:
            self._count(1)
            for number in range(turn, TURNS):
                async with self.places:
                    await workspace.run(f"(sleep 1000 &); echo turn {number} >> turns.txt", PATIENT)
                    snapshot = await asyncio.to_thread(workspace.snapshot)
                _report(id=id, turn=number + 1, snapshot=snapshot.digest)
            async with self.places:
                verdict = await judge(workspace, HIDDEN)
        self._count(-1)
        _report(id=id, reward=verdict.reward)

    def _count(self, change: int) -> None:
        self.open += change
        _report(opened=self.open)


def _report(**event: object) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    asyncio.run(_Worker().serve())
