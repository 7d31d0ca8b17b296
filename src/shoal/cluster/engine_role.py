"""`shoal engine join`: an engine of this host serves a run of another.

    the run  <--lease--  this process  --loopback-->  the engine: Shoal's own, or a command such as `vllm serve`
       '------HTTP, with its own token----^

This process speaks Shoal's engine protocol to the run, pulls each Version to this host's disk, and has the engine load
it from there. The engine itself listens on loopback only, and no route takes a path.
"""

import asyncio
import contextlib
import itertools
import os
import secrets
import shlex
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from starlette.applications import Starlette

from shoal.cluster.registry import EngineRole, OtherRun, RunInfo, first_info, run_info
from shoal.config import EngineConfig, ModelConfig
from shoal.engine.external.detect_server import connect
from shoal.engine.pool.replica import PoolEngine
from shoal.engine.server import protocol
from shoal.engine.server.http_client import engine_child
from shoal.engine.server.protocol import UpdateWeightsRequest
from shoal.engine.server.router import engine_app, posted
from shoal.errors import ChildDied, ConfigError, EngineUnavailable, RequestRefused
from shoal.files import MODEL_FILE
from shoal.interfaces import EngineInfo
from shoal.net.client import Client
from shoal.net.joining import hold_lease
from shoal.net.listening import free_port, own_address, tls_files
from shoal.net.process import GRACE_S, PARENT, Child, cores, die_with_parent
from shoal.net.server import serving
from shoal.weights.pull import VersionPuller


class Command:
    """A running command, as an async context manager; leaving it ends the command and its process group."""

    def __init__(self, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        """`env` replaces the environment of this process."""
        self._words, self._log, self._env = list(words), log, dict(os.environ if env is None else env)

    async def __aenter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        os.environ.pop(PARENT, None)
        try:
            with self._log.open("ab") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *self._words,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self._env,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
        except OSError as error:
            raise ChildDied(f"{self._words[0]}: cannot be started: {error.strerror}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()

    async def died(self) -> str:
        """Waits until the command has ended; returns how, with the last line of its log."""
        code = await self._process.wait()
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"it ended with code {code}: {lines[-1] if lines else 'no output'}"


START_TIMEOUT_S = 900.0
ASK_AGAIN_S = 1.0
STOP_GRACE_S = 2


@dataclass(frozen=True, slots=True)
class EngineHost:
    """Options of `shoal engine join`."""

    url: str
    """The run's."""
    token: str
    folder: Path
    """Where models, Versions and logs are kept."""
    command: Sequence[str] = ()
    """Server of another project; `{model}` and `{port}` in it are replaced. Shoal's own engine when empty."""
    host: str = ""
    """Address to listen at; the one by which this host reaches the run when empty."""
    port: int = 0
    device: str = ""
    threads: int = 0

    async def run(self, announce: Callable[[str], None]) -> None:
        """Serves until it is cancelled; a later run at the same URL is served too. Raises a `ShoalError`."""
        while True:
            client = Client(self.url, token=self.token)
            try:
                info = await first_info(client, announce)
                puller = VersionPuller(client, self.folder / info.key.hex()[:16], info.key)
                if info.adapters and self.command:
                    raise ConfigError("COMMAND: expected none, a Tinker server needs the adapters of Shoal's engine")
                try:
                    model_dir = await puller.pull(0)
                except EngineUnavailable as error:  # the run has ended meanwhile, or another one began
                    announce(str(error))
                    await asyncio.sleep(ASK_AGAIN_S)
                    continue
                try:
                    async with self._engine(info, model_dir) as (engine, died):
                        await self._serve(engine, died, puller, info, announce)
                except OtherRun as error:
                    announce(f"{error}; the engine is started again")
            finally:
                await client.aclose()

    async def _serve(
        self,
        engine: PoolEngine,
        died: "asyncio.Task[str]",
        puller: VersionPuller,
        info: RunInfo,
        announce: Callable[[str], None],
    ) -> None:
        """Serves the engine and holds its lease. Raises `ChildDied` when the engine ends."""
        token, host = secrets.token_urlsafe(24), self.host or own_address(self.url)
        app = PullingFront(engine, puller).app(token)
        async with serving(app, host, self.port, tls=tls_files(), idle_s=600, grace_s=1) as url:
            role = EngineRole(url, token)
            holding = hold_lease(self.url, self.token, role, announce, check=_check(puller, info))
            leased = asyncio.create_task(holding, name="lease")
            try:
                await asyncio.wait({died, leased}, return_when=asyncio.FIRST_COMPLETED)
                if died.done():
                    raise ChildDied(died.result())
                await leased
            finally:
                leased.cancel()
                await asyncio.wait({leased})

    @asynccontextmanager
    async def _engine(self, info: RunInfo, model_dir: Path) -> "AsyncIterator[tuple[PoolEngine, asyncio.Task[str]]]":
        """Starts the engine; the task ends with it, and has the reason."""
        settings, log = EngineConfig.model_validate_json(info.engine_json), self.folder / "engine.log"
        if not self.command:
            model = ModelConfig.model_validate_json(info.model_json)
            child = engine_child(
                model_dir,
                settings,
                model.model_copy(update={"device": self.device or model.device}),
                max_model_len=info.max_model_len,
                threads=self.threads or cores(),
                log=log,
                weights=model_dir.parent,
                record_routing=info.replays,
            )
            async with child, aclosing(await child.serving(START_TIMEOUT_S)) as own:
                died = asyncio.create_task(_how(child), name="engine process")
                yield own, died
                died.cancel()
            return
        port = free_port()
        words = [word.replace("{model}", str(model_dir)).replace("{port}", str(port)) for word in self.command]
        async with Command(words, log) as command:
            died = asyncio.create_task(command.died(), name=shlex.join(self.command)[:40])
            connecting = asyncio.create_task(self._connected(port, settings, model_dir, info), name="engine start")
            await asyncio.wait({died, connecting}, return_when=asyncio.FIRST_COMPLETED, timeout=START_TIMEOUT_S)
            if not connecting.done():
                connecting.cancel()
                why = died.result() if died.done() else f"it does not answer on port {port} in {START_TIMEOUT_S:g} s"
                raise ChildDied(f"{shlex.join(words)}: {why}")
            engine = connecting.result()
            try:
                yield engine, died
            finally:
                died.cancel()
                await engine.aclose()

    async def _connected(self, port: int, settings: EngineConfig, model_dir: Path, info: RunInfo) -> PoolEngine:
        """The engine that the command serves, once it answers."""
        while True:
            try:
                return await connect(
                    f"http://127.0.0.1:{port}",
                    on_update=settings.on_update,
                    model_dir=model_dir,
                    sampling=info.sampling,
                    routing=info.replays,
                )
            except EngineUnavailable:
                await asyncio.sleep(ASK_AGAIN_S)


def _check(puller: VersionPuller, info: RunInfo) -> Callable[[Client], Awaitable[None]]:
    """Check that another process of the run may use the engine only while it has the engine's Version."""
    known = {info.process}

    async def check(client: Client) -> None:
        now = (await run_info(client, info.key)).process
        if now not in known and not await puller.is_of_run():
            raise OtherRun("the run goes on from an older copy, without the Version of this engine")
        known.add(now)

    return check


async def _how(child: Child) -> str:
    return str(await child.died())


@dataclass(frozen=True, slots=True)
class PullingFront:
    """An engine of this host, which loads Versions that are pulled first. Implements `router.ServedEngine`."""

    engine: PoolEngine
    puller: VersionPuller

    def app(self, token: str) -> Starlette:
        """Application of the engine's routes."""
        pull = posted("/pull_weights", UpdateWeightsRequest, self.pull_weights)
        return engine_app(self, token=token, more=[pull])

    async def generate(self, asked: protocol.GenerateRequest) -> protocol.GenerateResponse:
        """Implements `ServedEngine`."""
        sampling, n = protocol.sampling_of(asked.sampling_params), asked.sampling_params.n
        answers = await self.engine.generate(
            asked.token_ids, sampling, n=n, priority=asked.priority, adapter=asked.model or ""
        )
        return protocol.GenerateResponse([*itertools.starmap(protocol.choice_of, enumerate(answers))], asked.request_id)

    async def score(self, asked: protocol.LogprobsRequest) -> protocol.ScoreResponse:
        """Implements `ServedEngine`."""
        return await self.engine.scored(asked.token_ids, asked.others, adapter=asked.model or "")

    async def abort(self) -> int:
        """Implements `ServedEngine`."""
        await self.engine.abort()
        return 0

    async def pull_weights(self, asked: UpdateWeightsRequest) -> protocol.WeightInfo:
        """Fetches a Version, which the engine is to load later."""
        await self.puller.pull(asked.version)
        return protocol.WeightInfo(asked.version, "")

    async def update_weights(self, asked: UpdateWeightsRequest) -> protocol.WeightInfo:
        """Implements `ServedEngine`."""
        if asked.path:
            raise RequestRefused("path: expected none, this engine pulls its versions")
        directory = await self.puller.pull(asked.version)
        whole = asked.version == 0 or not await asyncio.to_thread((directory / MODEL_FILE).exists)
        await self.engine.update_weights(asked.version, directory if whole else directory / MODEL_FILE)
        self.puller.remove_before(asked.version)
        return protocol.WeightInfo(asked.version, "")

    async def load_adapter(self, asked: protocol.LoadAdapterRequest) -> protocol.LoadedAdapters:
        """Implements `ServedEngine`."""
        if asked.lora_path:
            raise RequestRefused("lora_path: expected none, this engine pulls its versions")
        directory = await self.puller.pull(asked.version)
        loaded = await self.engine.load_adapter(asked.lora_name, asked.version, directory)
        self.puller.remove_before(asked.version)
        return protocol.LoadedAdapters(loaded)

    async def unload_adapter(self, asked: protocol.UnloadAdapterRequest) -> protocol.LoadedAdapters:
        """Implements `ServedEngine`."""
        return protocol.LoadedAdapters(await self.engine.unload_adapter(asked.lora_name))

    async def health(self) -> None:
        """Implements `ServedEngine`."""
        await self.engine.alive()

    async def info(self) -> EngineInfo:
        """Implements `ServedEngine`."""
        return await self.engine.info()
