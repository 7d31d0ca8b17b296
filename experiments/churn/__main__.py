"""`python -m experiments.churn [--seconds 300] [--results DIR]`; the cells of time are in claim.md."""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase

from benchmarks.processes import SHOAL, commit, started
from experiments.churn.cut import Cut
from experiments.churn.findings import findings_of, has_step
from shoal.config import parse, to_toml
from shoal.net.listening import free_port
from shoal.run.demo_model.architecture import Shape, save, untrained
from shoal.swarm.wire.invitation import NatsOptions
from shoal.swarm.wire.nats import NatsExchange
from shoal.swarm.wire.server import NatsServer, ServerOptions

HERE = Path(__file__).parent
SERVERS = 3
TOKEN = "coral"
STOP_TIMEOUT_S = 20.0
START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How long, and how often something dies."""

    seconds: float = 300.0
    period_s: float = 20.0
    victims: int = 1
    """Training nodes that are killed and resumed."""
    steady: int = 2
    """Training nodes that nobody kills; the last one is cut off where that can be done."""
    generators: int = 2


@dataclass(slots=True)
class Happened:
    """What was done to the swarm, as (seconds since the start, what)."""

    began_s: float
    events: list[tuple[float, str]] = field(default_factory=list)

    def note(self, what: str) -> None:
        """Now."""
        self.events.append((round(time.time() - self.began_s, 1), what))
        sys.stderr.write(f"{self.events[-1][0]:6.1f} s  {what}\n")


class Swarm:
    """Everything that runs; all of it in one folder."""

    def __init__(self, folder: Path, scale: Scale, cut: Cut) -> None:
        self._folder, self._scale, self._cut = folder, scale, cut
        self._tasks = folder / "tasks.jsonl"
        self._ports = [free_port() for _ in range(2 * SERVERS)]
        self.urls = [f"nats://{TOKEN}@{cut.host}:{port}" for port in self._ports[:SERVERS]]
        self._servers: dict[int, NatsServer] = {}
        self._members: dict[str, asyncio.subprocess.Process] = {}
        self._joined = 0
        self.happened = Happened(time.time())

    async def start(self) -> None:
        """Servers, nodes, generators."""
        save(untrained(Shape(width=32, heads=2, feed_forward=64, context=128), 0), self._folder / "tiny")
        questions = [{"prompt": f"say {letter}{i}", "answer": letter} for letter in ascii_lowercase for i in range(20)]
        self._tasks.write_text("\n".join(map(json.dumps, questions)))
        for number in range(SERVERS):
            await self._serve(number)
        for number in range(self._scale.steady):
            await self._train(f"steady-{number}", cut_off=number == self._scale.steady - 1)
        for number in range(self._scale.victims):
            await self._train(f"victim-{number}")
        for _ in range(self._scale.generators):
            await self._join()
        names = [name for name in self._members if not name.startswith("rule")]
        async with asyncio.timeout(START_TIMEOUT_S):
            while not all(has_step(self._folder / name) for name in names):  # noqa: ASYNC110
                await asyncio.sleep(0.5)
        self.happened.began_s = time.time()

    async def stop(self) -> None:
        """Everybody is told to end; who does not is killed."""
        for name in list(self._members):
            await self._end(name, signal.SIGINT)
        for number in list(self._servers):
            await self._servers.pop(number).__aexit__(None, None, None)

    async def suffer(self) -> None:
        """In each period nodes are killed and replaced, and half a period later servers die or the link is cut."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._each_period(0.5, self._kill_nodes))
            group.create_task(self._each_period(1.0, self._break_network))

    async def _each_period(self, share: float, blow: Callable[[int], Awaitable[None]]) -> None:
        scale, began_s = self._scale, time.monotonic()
        for turn in range(max(1, int(scale.seconds / scale.period_s))):
            await asyncio.sleep(max(0.0, began_s + (turn + share) * scale.period_s - time.monotonic()))
            await blow(turn)

    async def _kill_nodes(self, _: int) -> None:
        await self._kill_generator()
        for number in range(self._scale.victims):
            await self._kill_and_resume(f"victim-{number}")

    async def _break_network(self, turn: int) -> None:
        match turn % 4:
            case 0 | 2:
                await self._restart([turn // 2 % SERVERS])
            case 1:
                await self._part()
            case 3:
                await self._restart(list(range(SERVERS)))

    def ended(self) -> dict[str, str]:
        """Members that ended by themselves, with their last words: there should be none."""
        codes = {name: process.returncode for name, process in self._members.items()}
        return {
            name: f"code {code}: {_last_line(self._folder / f'{name}.log')}"
            for name, code in codes.items()
            if code is not None
        }

    async def late_joiner(self) -> tuple[float, int]:
        """Seconds until somebody who joins now has the history, and how many frames that is."""
        began_s, frames = time.monotonic(), 0
        last_s = began_s
        async with NatsExchange(NatsOptions(tuple(self.urls), "reef")) as exchange:
            try:
                async with asyncio.timeout(30):
                    while (found := len(await exchange.receive(256))) == 256 or not frames:
                        frames, last_s = frames + found, time.monotonic()
            except TimeoutError:
                pass
        return last_s - began_s, frames

    async def _restart(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            server = self._servers.pop(number)
            os.kill(server.pid, signal.SIGKILL)
            await server.__aexit__(None, None, None)
        self.happened.note(f"killed servers {list(numbers)}")
        await asyncio.sleep(self._scale.period_s / 4)
        for number in numbers:
            await self._serve(number)
        self.happened.note(f"started servers {list(numbers)}")

    async def _part(self) -> None:
        if not self._cut.possible:
            return
        self._cut.down()
        self.happened.note("cut off the last steady node")
        await asyncio.sleep(self._scale.period_s)
        self._cut.up()
        self.happened.note("healed")

    async def _serve(self, number: int) -> None:
        clients, cluster = self._ports[:SERVERS], self._ports[SERVERS:]
        options = ServerOptions(
            self._folder / f"server-{number}",
            host=self._cut.listen,
            port=clients[number],
            name=f"server-{number}",
            cluster_port=cluster[number],
            token=TOKEN,
            routes=tuple(f"nats://127.0.0.1:{port}" for i, port in enumerate(cluster) if i != number),
        )
        server = NatsServer(options)
        await server.__aenter__()
        self._servers[number] = server

    async def _kill_generator(self) -> None:
        names = [name for name in self._members if name.startswith("rule")]
        if names:
            await self._end(names[0], signal.SIGKILL)
            self.happened.note(f"killed {names[0]}")
            await self._join()

    async def _kill_and_resume(self, name: str) -> None:
        if not (self._folder / name / "checkpoints").is_dir():
            return  # it has hardly begun; a run without a step is no run to resume
        await self._end(name, signal.SIGKILL)
        self.happened.note(f"killed {name}")
        await self._train(name, resume=True)

    async def _join(self) -> None:
        name = f"rule-{self._joined}"
        self._joined += 1
        path = self._config(name)
        await self._start(name, ["swarm", "join", str(path), "--rule", "truth", "--every", "0.25"])

    async def _train(self, name: str, *, resume: bool = False, cut_off: bool = False) -> None:
        prefix = self._cut.prefix if cut_off else []
        await self._start(name, ["train", str(self._config(name)), *(["--resume"] if resume else [])], prefix)

    async def _start(self, name: str, arguments: Sequence[str], prefix: Sequence[str] = ()) -> None:
        self._members[name] = await started([*SHOAL, *arguments], self._folder / f"{name}.log", prefix)

    async def _end(self, name: str, how: signal.Signals) -> None:
        process = self._members.pop(name)
        if process.returncode is None:
            process.send_signal(how)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    def _config(self, name: str) -> Path:
        path = self._folder / f"{name}.toml"
        settings = parse(
            {
                "run_dir": str(self._folder / name),
                "seed": sum(map(ord, name)),
                "model": {"path": str(self._folder / "tiny")},
                "tasks": [{"name": "letters", "service": "jsonl", "path": str(self._tasks), "scorer": "contains"}],
                "rollout": {"group_size": 4, "max_tokens": 8},
                "train": {"steps": 1_000_000, "groups_per_step": 2, "lr": 1e-4},
                "eval": {"every_steps": 0, "questions": 1},
                "checkpoint": {"every_steps": 20},
                "swarm": {"servers": self.urls, "external_groups": 2},
            }
        )
        path.write_text(to_toml(settings))
        return path


def _last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or [""])[-1]


async def run(folder: Path, scale: Scale) -> dict[str, object]:
    """The whole experiment, and what came of it."""
    async with AsyncExitStack() as stack:
        cut = stack.enter_context(Cut())
        swarm = Swarm(folder, scale, cut)
        stack.push_async_callback(swarm.stop)
        await swarm.start()
        await swarm.suffer()
        late_s, late_frames = await swarm.late_joiner()
        stopped = swarm.ended()
        await swarm.stop()
        return {
            "commit": commit(),
            "seconds": scale.seconds,
            "stopped_by_themselves": stopped,
            "partition": cut.possible,
            "late_joiner_s": round(late_s, 2),
            "late_joiner_frames": late_frames,
            "nodes": findings_of(folder),
            "events": swarm.happened.events,
        }


def main(arguments: list[str]) -> None:
    """Runs the experiment."""
    parser = argparse.ArgumentParser(prog="experiments.churn")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--period", type=float, default=20.0)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run(Path(folder), Scale(options.seconds, options.period)))
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "churn.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "events"}))


if __name__ == "__main__":
    main(sys.argv[1:])
