"""What hostile peers cost an honest node: its steps per second while they send to it, and while they do not.

steps_ratio          steps per second with the flood over steps without it
steps_per_s, steps_per_s_hostile
frames_per_s         that the hostile peers really sent
trained_hostile      groups of theirs that the node trained: none
trained_honest       groups of the one honest generator that it trained all the while

One run, one server, windows in turn: in the windows "without" the same frames go to another swarm on the same server,
so that sender and server, which would be other machines, cost the same in both. See `flood.py` for what is sent.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from shoal.buffer.audit import audit
from shoal.config import Config, parse, to_toml
from shoal.errors import ChildDied
from shoal.process import PARENT
from shoal.run.generating import generate
from shoal.run.membership import FOLDER
from shoal.small_model import Shape, save, untrained
from shoal.swarm.generator import Pace
from shoal.swarm.member import STATUS_FILE
from shoal.swarm.rules import RuleSolver
from shoal.swarm.server import NatsServer, ServerOptions

Report = dict[str, object]
SWARM, OTHER = "reef", "elsewhere"
RATE_PER_S = 10_000
SETTLING_S = 2.0
"""After a change of windows, not counted."""
MAIN = "from shoal.process import die_with_parent; die_with_parent(); from shoal.cli import main; main()"


def measure(quick: bool) -> Report:
    """All figures of the list above."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measured(Path(folder), window_s=4.0 if quick else 15.0, windows=2 if quick else 12))


async def _measured(folder: Path, *, window_s: float, windows: int) -> Report:
    save(untrained(Shape(width=64, heads=2, feed_forward=128, context=128), 0), folder / "tiny")
    async with NatsServer(ServerOptions(folder / "server")) as server:
        config = _config(folder, "node", server.url)
        (folder / "node.toml").write_text(to_toml(config))
        honest = asyncio.create_task(
            generate(_config(folder, "honest", server.url), RuleSolver("truth", 0), Pace(4, 0.25))
        )
        with (folder / "node.log").open("wb") as log:
            node = await _python(["-c", MAIN, "train", str(folder / "node.toml")], log.fileno())
        try:
            await _steps(folder / "node", 5)
            arguments = [server.url, SWARM, OTHER, str(window_s), str(windows), str(RATE_PER_S)]
            flood = await _python(["-m", "shoal.bench.flood", *arguments], asyncio.subprocess.PIPE)
            windows_seen, sent = await _counted(flood, folder / "node")
            await flood.wait()
        finally:
            honest.cancel()
            if node.returncode is None:
                node.send_signal(signal.SIGINT)  # so that it writes its status
            await asyncio.gather(honest, node.wait(), return_exceptions=True)
    return _report(folder, windows_seen, sent / (window_s * windows))


def _config(folder: Path, name: str, url: str) -> Config:
    return parse(
        {
            "run_dir": str(folder / name),
            "model": {"path": str(folder / "tiny")},
            "tasks": [{"name": "gcd", "rewrite": [[r"^.*numbers: ([\d, ]+).*$", r"gcd \1"]]}],
            "rollout": {"group_size": 4, "max_tokens": 16},
            "train": {"steps": 1_000_000, "groups_per_step": 4, "lr": 1e-5},
            "eval": {"every_steps": 0, "questions": 1},
            "checkpoint": {"every_steps": 1_000_000},
            "swarm": {"servers": [url], "name": SWARM, "external_groups": 2, "credit": "skill"},
        }
    )


async def _python(arguments: list[str], output: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output if output >= 0 else None,
        env={**os.environ, PARENT: str(os.getpid())},
    )


async def _steps(run: Path, count: int) -> None:
    """Waits for a node's first steps."""
    async with asyncio.timeout(180):
        while _steps_so_far(run) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def _steps_so_far(run: Path) -> int:
    path = run / "metrics.jsonl"
    return (
        path.read_bytes().count(b'"kind":"step"') + path.read_bytes().count(b'"kind": "step"') if path.exists() else 0
    )


async def _counted(flood: asyncio.subprocess.Process, run: Path) -> tuple[list[tuple[str, float, int]], int]:
    """(swarm that is flooded, seconds counted, steps in them) of each window, and frames sent."""
    assert flood.stdout is not None
    loop = asyncio.get_running_loop()
    marks: list[tuple[str, float, int, float, int]] = []
    sent = 0
    name, settled_s, settled = "", 0.0, 0
    while line := (await flood.stdout.readline()).decode().split():
        now_s, now = loop.time(), _steps_so_far(run)
        if name:
            marks.append((name, settled_s, settled, now_s, now))
        name = ""
        if line[0] == "sent":
            sent += int(line[1])
        elif line[0] != "end":
            await asyncio.sleep(SETTLING_S)
            name, settled_s, settled = line[0], loop.time(), _steps_so_far(run)
    return [(name, end_s - begin_s, after - before) for name, begin_s, before, end_s, after in marks], sent


def _report(folder: Path, windows: list[tuple[str, float, int]], frames_per_s: float) -> Report:
    rates = {}
    for swarm in (SWARM, OTHER):
        seconds = sum(spent for name, spent, _ in windows if name == swarm)
        if not seconds:
            raise ChildDied("bench hostile: the flood ended before it began")
        rates[swarm] = sum(steps for name, _, steps in windows if name == swarm) / seconds
    report = audit(folder / "node")
    status = json.loads((folder / "node" / FOLDER / STATUS_FILE).read_text())
    honest = json.loads((folder / "honest" / FOLDER / STATUS_FILE).read_text())["peer_id"]
    taken = {peer_id: values["taken"] for peer_id, values in status["peers"].items()}
    return {
        "steps_ratio": rates[SWARM] / rates[OTHER],
        "steps_per_s": rates[OTHER],
        "steps_per_s_hostile": rates[SWARM],
        "frames_per_s": frames_per_s,
        "trained_honest": taken.pop(honest, 0),
        "trained_hostile": sum(taken.values()),
        "refused": status["refused"],
        "audit": report.ok,
    }
