"""What hostile peers cost an honest node: its steps per second while they send to it, and while they do not.

steps_ratio          steps per second with the flood over steps while the same frames go to another swarm: median of
                     `steps_ratios`, each of two windows side by side
steps_ratio_even     the same at equal speed of the machine: each ratio times that of the engine's processor time per
                     step, which is the same work in all windows and takes up to half as long again in some
steps_ratio_idle     steps per second with the flood over steps while nobody sends anything
cpu_ratio            processor time of the node per step with the flood over that while it goes to another swarm
steps_per_s          with the flood, with the flood elsewhere, without one
cpu_s_per_step       processor time of the node in the same windows, its workers and trainer included
cpu_s_by_process     the same by process; a killed worker takes its time out of it, and out of `cpu_ratio`
external_per_step    groups of the honest generator that a step trained in the same windows
frames_per_s         that the hostile peers really sent
trained_hostile      groups of theirs that the node trained: none
trained_honest       groups of the one honest generator that it trained all the while

One run, one server, three kinds of windows in turn. Sender and server would be other machines: they cost this one as
much when the flood goes to another swarm, kept in a stream of the same kind, and only the node is spared. Without any
flood the cores of a small machine are free for the node, so that `steps_ratio_idle` is about the machine as well.
See `flood.py` for what is sent.
"""

import asyncio
import json
import re
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from benchmarks.flood import NOBODY
from benchmarks.processes import SHOAL, started
from shoal import wire
from shoal.config import Config, parse, to_toml
from shoal.errors import ChildDied
from shoal.experience.audit import audit
from shoal.run.commands.swarm import generate
from shoal.run.demo_model.architecture import Shape, save, untrained
from shoal.run.join_swarm import FOLDER
from shoal.swarm.generator import GeneratorPace, RuleSolver
from shoal.swarm.peer import STATUS_FILE
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.wire.invitation import NatsOptions
from shoal.swarm.wire.nats import NatsExchange
from shoal.swarm.wire.offer import Claim
from shoal.swarm.wire.server import NatsServer, ServerOptions
from shoal.tasks.library import Library
from shoal.types import Split

Report = dict[str, object]
SWARM, OTHER = "reef", "elsewhere"
RATE_PER_S = 10_000
ROUNDS = 5
HANGING = 300
"""Authors of an answer that hangs."""
COUNTED_S = 10.0
"""Counted seconds of each window."""
SETTLING_S = {OTHER: 2.0, SWARM: 2.0, NOBODY: 20.0}
"""Seconds at the start of a window that do not count: after a flood the node reads its rest for a while."""
ENGINE = "shoal.engine.server.http_server"


@dataclass(frozen=True, slots=True)
class Mark:
    """Progress of the node at some time."""

    time_s: float
    steps: int
    external: int
    """Groups of peers trained."""
    cpu_s: Counter[str]
    """Processor seconds of its processes, by module."""


def measure(quick: bool) -> Report:
    """Measures all figures of the list above."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measured(Path(folder), 2.0 if quick else COUNTED_S, 1 if quick else ROUNDS))


async def _measured(folder: Path, counted_s: float, rounds: int) -> Report:
    save(untrained(Shape(width=64, heads=2, feed_forward=128, context=128), 0), folder / "tiny")
    async with NatsServer(ServerOptions(folder / "server")) as server:
        await _made(server.url, OTHER)
        config = _config(folder, "node", server.url)
        (folder / "node.toml").write_text(to_toml(config))
        honest = asyncio.create_task(
            generate(_config(folder, "honest", server.url), RuleSolver("truth", 0), GeneratorPace(4, 0.25))
        )
        node = await started([*SHOAL, "train", str(folder / "node.toml")], folder / "node.log")
        try:
            await _steps(folder / "node", 5)
            windows = ",".join(f"{swarm}:{settling_s + counted_s}" for swarm, settling_s in SETTLING_S.items())
            claims = folder / "claims"
            claims.write_bytes(wire.encode(await _claims(config)))
            arguments = [server.url, windows, str(rounds), str(RATE_PER_S), str(claims)]
            flood = await started(["-m", "benchmarks.flood", *arguments], None)
            spans, sent = await _counted(flood, lambda: _mark(folder / "node", node.pid))
            await flood.wait()
        finally:
            honest.cancel()
            if node.returncode is None:
                node.send_signal(signal.SIGINT)  # so that it writes its status
            await asyncio.gather(honest, node.wait(), return_exceptions=True)
    flooded_s = rounds * (2 * counted_s + SETTLING_S[OTHER] + SETTLING_S[SWARM])
    return {**_rates(spans), "frames_per_s": sent / flooded_s, **_outcome(folder)}


async def _claims(config: Config) -> list[Claim]:
    """Questions of the node's own tasks to which an answer can hang."""
    with Library(config.tasks, config.seed) as library:
        own = OwnTasks(library.services)
        (service,) = [one for one in library.services if one.name == "countdown"]
        claims = [await own.claim(service.draw(Split.TRAIN, i)) for i in range(HANGING)]
        own.close()
    return claims


async def _made(url: str, swarm: str) -> None:
    """Makes the stream of a swarm without readers."""
    async with NatsExchange(NatsOptions((url,), swarm)) as exchange:
        joining = asyncio.create_task(exchange.receive(1))
        while not exchange.connected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)


def _config(folder: Path, name: str, url: str) -> Config:
    return parse(
        {
            "run_dir": str(folder / name),
            "model": {"path": str(folder / "tiny")},
            "tasks": [
                {"name": "gcd", "rewrite": [[r"^.*numbers: ([\d, ]+).*$", r"gcd \1"]]},
                {"name": "countdown", "rewrite": [[r"(?s)\n.*$", ""]]},
            ],
            "rollout": {"group_size": 4, "max_tokens": 16},
            "train": {"steps": 1_000_000, "groups_per_step": 4, "lr": 1e-5},
            "eval": {"every_steps": 0, "questions": 1},
            "checkpoint": {"every_steps": 1_000_000},
            "swarm": {"servers": [url], "name": SWARM, "external_groups": 2},
        }
    )


async def _steps(run: Path, count: int) -> None:
    """Waits for a node's first steps."""
    async with asyncio.timeout(180):
        while _steps_so_far(run) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def _steps_so_far(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"kind":"step"') if path.exists() else 0


def _mark(run: Path, pid: int) -> Mark:
    now_s, cpu_s = time.monotonic(), _cpu_s(pid)
    external = [int(count) for count in re.findall(rb'"external":(\d+)', (run / "metrics.jsonl").read_bytes())]
    return Mark(now_s, _steps_so_far(run), sum(external), cpu_s)


def _cpu_s(pid: int) -> Counter[str]:
    """Processor seconds of a process and its descendants, by module; of children that have ended, under `ended`."""
    root, found = psutil.Process(pid), Counter[str]()
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            words, times = process.cmdline(), process.cpu_times()
            found[words[words.index("-m") + 1] if "-m" in words else "main"] += times.user + times.system
            if process == root:
                found["ended"] = times.children_user + times.children_system
    return found


async def _counted(
    flood: asyncio.subprocess.Process, now: Callable[[], Mark]
) -> tuple[list[tuple[str, Mark, Mark]], int]:
    """Measures each window as (flooded swarm, begin, end), and counts the frames sent."""
    assert flood.stdout is not None
    spans: list[tuple[str, Mark, Mark]] = []
    sent, swarm, begun = 0, "", now()
    while line := (await flood.stdout.readline()).decode().split():
        if line[0] == "sent":
            spans.append((swarm, begun, now()))
            sent += int(line[1])
        else:
            await asyncio.sleep(SETTLING_S[line[0]])
            swarm, begun = line[0], now()
    return spans, sent


def _rates(spans: Sequence[tuple[str, Mark, Mark]]) -> Report:
    """Figures of the windows."""
    steps: defaultdict[str, float] = defaultdict(float)
    seconds, external = steps.copy(), steps.copy()
    processes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for swarm, begun, ended in spans:
        steps[swarm] += ended.steps - begun.steps
        seconds[swarm] += ended.time_s - begun.time_s
        processes[swarm].update({name: cpu_s - begun.cpu_s[name] for name, cpu_s in ended.cpu_s.items()})
        external[swarm] += ended.external - begun.external
    if not all(steps[swarm] for swarm in (SWARM, OTHER, NOBODY)):
        raise ChildDied("bench hostile: the flood or the node ended before all was measured")
    pairs = list(zip(spans[::3], spans[1::3], strict=True))
    ratios = [_per_s(flooded) / _per_s(spared) for spared, flooded in pairs]
    slower = [_engine_s(flooded) / _engine_s(spared) for spared, flooded in pairs]
    per_s = {swarm: steps[swarm] / seconds[swarm] for swarm in steps}
    names = {"flood": SWARM, "elsewhere": OTHER, "none": NOBODY}
    cpu_s = {swarm: found.total() for swarm, found in processes.items()}
    return {
        "steps_ratio": median(ratios),
        "steps_ratios": ratios,
        "steps_ratio_even": median(ratio * slow for ratio, slow in zip(ratios, slower, strict=True)),
        "steps_ratio_idle": per_s[SWARM] / per_s[NOBODY],
        "cpu_ratio": cpu_s[SWARM] / steps[SWARM] / (cpu_s[OTHER] / steps[OTHER]),
        "steps_per_s": {name: per_s[swarm] for name, swarm in names.items()},
        "cpu_s_per_step": {name: cpu_s[swarm] / steps[swarm] for name, swarm in names.items()},
        "cpu_s_by_process": {
            name: {module: total_s / steps[swarm] for module, total_s in processes[swarm].items()}
            for name, swarm in names.items()
        },
        "external_per_step": {name: external[swarm] / steps[swarm] for name, swarm in names.items()},
    }


def _per_s(span: tuple[str, Mark, Mark]) -> float:
    """Steps per second of a window."""
    _, begun, ended = span
    return (ended.steps - begun.steps) / (ended.time_s - begun.time_s)


def _engine_s(span: tuple[str, Mark, Mark]) -> float:
    """Processor seconds of the engine per step of a window."""
    _, begun, ended = span
    return (ended.cpu_s[ENGINE] - begun.cpu_s[ENGINE]) / (ended.steps - begun.steps)


def _outcome(folder: Path) -> Report:
    """Counts of the node's use of the frames."""
    status = json.loads((folder / "node" / FOLDER / STATUS_FILE).read_text())
    honest = json.loads((folder / "honest" / FOLDER / STATUS_FILE).read_text())["peer_id"]
    taken = {peer_id: values["taken"] for peer_id, values in status["peers"].items()}
    return {
        "trained_honest": taken.pop(honest, 0),
        "trained_hostile": sum(taken.values()),
        "refused": status["refused"],
        "audit": audit(folder / "node").ok,
    }
