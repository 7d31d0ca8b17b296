"""A crew is a run of remote task services, with an engine that echoes and a training step that only records.

Real parts are the services and their protocol, sessions at the gateway over HTTP, the token trees, ratios, and the log
on the disk. The engine answers by the seed, and a training step takes as long as its record.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import child_environment
from benchmarks.echo import CONTEXT, EchoEngine, tokenizer
from benchmarks.work import CoinScorer
from shoal.experience.buffer import Buffer
from shoal.experience.schema import RunMeta
from shoal.gateway.host import Host
from shoal.model.chat_template import ChatRenderer
from shoal.rollout.agents.runner import AgentRunner
from shoal.rollout.orchestrator import Health, Orchestrator, Source, attend
from shoal.tasks.remote_environment import EnvironmentScorer, RemoteEnvironment, TaskServer
from shoal.types import Sampling

START_TIMEOUT_S = 60.0


async def until(condition: Callable[[], bool], every_s: float = 0.02) -> None:
    """Polls a condition; returns when it holds."""
    while not condition():  # noqa: ASYNC110 - what is looked at are counters of another thread
        await asyncio.sleep(every_s)


@dataclass(frozen=True, slots=True)
class Load:
    """Amount of orchestrated work."""

    weights: Mapping[str, float]
    groups_per_step: int
    max_staleness: int
    max_running: int
    """Groups at once."""
    group_size: int = 4
    engine_s: tuple[float, float] = (0.01, 0.02)
    timeout_s: float = 120.0


@dataclass(slots=True)
class Crew:
    """A run in progress."""

    load: Load
    task_server: TaskServer
    buffer: Buffer
    host: Host
    engine: EchoEngine
    version: int = 0
    trained: Counter[str] = field(default_factory=Counter)
    ids: list[str] = field(default_factory=list)
    rollouts: Counter[str] = field(default_factory=Counter)
    """Rollouts of the trained groups, by status."""

    async def train(self, groups: int) -> None:
        """Consumes `groups` more groups, step by step."""
        for _ in range(groups // self.load.groups_per_step):
            step = self.version
            taken = await self.buffer.take(self.load.groups_per_step, step)
            await self.buffer.consumed(step, step, [group.id for group in taken], version_after=step + 1)
            self.version = self.engine.version = step + 1
            self.buffer.on_loaded(self.version)
            for group in taken:
                self.trained[group.task.service] += 1
                self.ids.append(group.id)
                self.rollouts.update(rollout.status.value for rollout in group.rollouts)

    @property
    def running(self) -> int:
        """Rollouts that services work on now."""
        services = self.task_server.services.values()
        return sum(worker.running for service in services for worker in service.workers.values())

    def finished(self, name: str) -> int:
        """Rollouts that a service has handed in."""
        return self.task_server.services[name].counts["rollout done"]


class Process:
    """Process `shoal task serve` of one echo task."""

    def __init__(self, path: str, url: str, *, name: str, token: str = "", folder: Path | None = None) -> None:
        """Serves the task at `path`, as seen from `folder`."""
        self._command = [sys.executable, "-m", "shoal.cli", "task", "serve", path, "--orchestrator", url]
        self._command += ["--name", name]
        self._folder = folder
        self._env = {**child_environment(), "SHOAL_RUN_TOKEN": token}
        self.start()

    def start(self) -> None:
        """Starts the process, also after its end."""
        self._child = subprocess.Popen(self._command, env=self._env, cwd=self._folder, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """Kills the process as `kill -9` does."""
        self._child.kill()
        self._child.wait()

    def wait(self) -> None:
        """Waits until the process has ended by itself."""
        self._child.wait()

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return self._child.poll() is None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid


@contextlib.asynccontextmanager
async def orchestrated(
    load: Load, paths: Sequence[tuple[str, str]], run_dir: Path
) -> AsyncIterator[tuple[Crew, list[Process]]]:
    """Opens a run whose tasks, (name, module:task) each, are served by processes; everything ends with the context."""
    token = "a token of the benchmark"
    with TaskServer(load.weights, token=token) as task_server, contextlib.ExitStack() as stack:
        processes = [Process(path, task_server.url, name=name, token=token) for name, path in paths]
        for process in processes:
            stack.callback(process.kill)
        services = {name: RemoteEnvironment(name, task_server) for name in load.weights}
        for service in services.values():
            await asyncio.to_thread(service.await_worker, START_TIMEOUT_S)
        made, engine = tokenizer(), EchoEngine(*load.engine_s)
        renderer = ChatRenderer(made, (made.eos_token_id,))
        meta = RunMeta(load.max_staleness, "drop", load.groups_per_step, 1)
        buffer = Buffer.open(run_dir, meta, max_running=load.max_running)
        try:
            async with Host.open(engine, renderer, max_model_len=CONTEXT) as host:
                crew = Crew(load, task_server, buffer, host, engine)
                running = asyncio.create_task(_orchestrator(crew, services).run(), name="orchestrator")
                try:
                    yield crew, processes
                finally:
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
        finally:
            await buffer.close()


def _orchestrator(crew: Crew, services: Mapping[str, RemoteEnvironment]) -> Orchestrator:
    load = crew.load
    scorer = EnvironmentScorer(dict(services), CoinScorer())

    def at_once(service: RemoteEnvironment) -> int:
        return -(-service.max_running // load.group_size)

    sources = []
    for service in services.values():
        runner = AgentRunner(crew.host, service.rollout, scorer, Sampling(64, seed=0), timeout_s=load.timeout_s)
        answer = partial(runner.rollouts, n=load.group_size)
        sources.append(Source(service, answer, partial(at_once, service), Health()))
    orchestrator = Orchestrator(sources, load.weights, crew.buffer)
    attend(crew.task_server, sources, orchestrator.wake)
    return orchestrator
