"""The engines of a run form one pool, kept full for as long as the run lasts.

    own      `engine.count` processes; one that ends is started again, and serves the newest weights before any request
    joined   engines that join the run and leave it as they like (`shoal engine join`)
    remote   `engine.urls`; one that does not answer, or turns out unusable during the run, is asked again and joins
             when it can

The run continues while engines come and go. It ends when none answers for long, or when one cannot be kept alive.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from shoal.cluster.registry import EngineRole
from shoal.engine.external.detect_server import connect
from shoal.engine.pool.answers import MOST_TIED, MOST_TOKENS, AnswerRules
from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.pool.replica import PoolEngine
from shoal.engine.pool.routing import WAVE_SHARE
from shoal.engine.server.http_client import EngineChild, HttpEngine, PullingEngine, engine_child
from shoal.errors import ChildDied, ConfigError, EngineError, EngineUnavailable, RequestRefused
from shoal.model.file_sizes import router_experts, sizes_of
from shoal.net.process import GRACE_S, Child
from shoal.net.run_server import LeasedWorker, NotWanted, RunServer
from shoal.run.prepare import Prepared
from shoal.types import Sampling

START_TIMEOUT_S = 300.0
SHORT_LIFE_S = 60.0
SHORT_LIVES = 3  # in a row, after which an engine is not started again
ASK_AGAIN_S = 5.0
ANSWER_TIMEOUT_S = 10.0
"""Seconds that an engine may take to report its state."""

OnEvent: TypeAlias = Callable[[str], None]
"""Callback that gets a sentence about a lost or missing engine."""


@dataclass(slots=True)
class RunEngines:
    """The pool of a run's engines, kept full; own processes are resumed or started again."""

    prepared: Prepared
    pool: EnginePool
    on_event: OnEvent
    ask_again_s: float = ASK_AGAIN_S
    """Seconds until a remote engine that could not join is asked again."""
    failures: list[str] = field(default_factory=list)
    """Failures of remote engines missing at the start."""
    running: dict[str, tuple[Child, HttpEngine]] = field(default_factory=dict)
    """Own engine processes."""
    starting: set[str] = field(default_factory=set)
    """Own engines that are starting, with a separate deadline."""

    async def helped(self, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> list[str]:
        """Resumes paused engines and kills silent ones, which then start again; returns a sentence for each."""
        actions = [f"{name} is starting" for name in sorted(self.starting)]
        for name, (child, engine) in list(self.running.items()):
            try:
                async with asyncio.timeout(answer_timeout_s):
                    await engine.alive()
                    if await engine.paused():
                        await engine.resume()
                        actions.append(f"{name} was paused and is resumed")
            except (EngineError, TimeoutError):
                child.kill()
                actions.append(f"{name} does not answer and is started again")
        return actions

    async def keep_own(self, name: str, ready: asyncio.Event) -> None:
        """Restarts the engine process whenever it ends. Raises `ChildDied` when it does not stay alive."""
        short_lives = 0
        while True:
            began_s = time.monotonic()
            try:
                how = await self._life(name, ready)
            except ChildDied as error:
                if not ready.is_set():
                    raise
                how = str(error)
            short_lives = short_lives + 1 if time.monotonic() - began_s < SHORT_LIFE_S else 0
            if short_lives == SHORT_LIVES:
                raise ChildDied(f"{how}; it ended {SHORT_LIVES} times within {SHORT_LIFE_S:g} s")
            self.on_event(how)

    async def _life(self, name: str, ready: asyncio.Event) -> str:
        """Runs one process from start to end; returns how it ended."""
        self.starting.add(name)
        async with self._child(name) as child:
            engine = await child.serving(START_TIMEOUT_S)
            ended = asyncio.create_task(child.died(), name=f"{name} process")
            try:
                try:
                    await self.pool.join(name, engine)
                except EngineError as error:  # most likely it is about to end
                    await asyncio.wait([ended], timeout=GRACE_S)
                    return str(ended.result()) if ended.done() else f"{name}: {error}"
                ready.set()
                self.starting.discard(name)
                self.running[name] = child, engine
                return str(await ended)
            finally:
                self.running.pop(name, None)
                ended.cancel()
                await self.pool.leave(name)

    def _child(self, name: str) -> EngineChild:
        prepared, config = self.prepared, self.prepared.config
        run_dir = Path(config.run_dir)
        gpus = dict(zip(_own_names(config.engine.count), prepared.devices.engines, strict=False))  # none on the CPU
        return engine_child(
            prepared.model_dir,
            config.engine,
            config.model,
            max_model_len=prepared.max_model_len,
            threads=max(1, prepared.threads.engine // config.engine.count),
            log=run_dir / "logs" / f"{name}.log",
            name=name,
            gpu=gpus.get(name),
            weights=run_dir / "weights",
            record_routing=config.train.router_replay,
        )

    async def keep_remote(self, url: str, ready: asyncio.Event) -> None:
        """Returns when the engine at `url` has joined; from then on the pool looks after it.

        Raises `ConfigError` or `RequestRefused` for an unusable engine at the start; later, other engines serve the
        run.
        """
        reported, prepared = False, self.prepared
        sampling, settings = prepared.sampling, prepared.config.engine
        while True:
            try:
                engine = await connect(
                    url,
                    on_update=settings.on_update,
                    model_dir=prepared.model_dir,
                    sampling=sampling,
                    adapters=settings.adapters,
                    routing=prepared.config.train.router_replay,
                )
                try:
                    await check_records(engine, sampling, routing=prepared.config.train.router_replay)
                except BaseException:
                    await engine.aclose()
                    raise
                await self.pool.join(url, engine)
                return
            except EngineUnavailable as error:
                if not ready.is_set():
                    self.failures.append(f"engine {url}: {error}")
            except (ConfigError, RequestRefused) as error:
                if not ready.is_set():
                    raise type(error)(f"engine {url}: {error}") from error
                if not reported:
                    self.on_event(f"{url} cannot join, and is asked again: {error}")
                reported = True
            finally:
                ready.set()
            await asyncio.sleep(self.ask_again_s)


async def check_records(engine: PoolEngine, sampling: Sampling, *, routing: bool) -> None:
    """Raises `ConfigError` for an engine whose answers lack what training has to know of each token."""
    if not (sampling.records_kept or routing):
        return
    refusal = ""
    try:
        one = next(iter(await engine.generate((1, 2, 3), replace(sampling, max_tokens=2))), None)
    except RequestRefused as error:
        one, refusal = None, f" ({error})"
    if sampling.records_kept and not (one and one.kept):
        raise ConfigError(
            f"its server does not report which tokens could be sampled{refusal}, and training has to know: start vLLM "
            f"with --return-sampling-mask or --max-logprobs {sampling.top_k + MOST_TIED}, use Shoal's own engine, or "
            "set rollout.top_p = 1 and rollout.top_k = 0"
        )
    if routing and not (one and one.routing):
        raise ConfigError(
            f"its server does not report the experts of its tokens{refusal}, which train.router_replay needs: start "
            "vLLM with --enable-return-routed-experts, or Shoal's own engine with --record-routing"
        )


def _own_names(count: int) -> list[str]:
    return ["engine"] if count == 1 else [f"engine-{i}" for i in range(count)]


@asynccontextmanager
async def engines(
    prepared: Prepared,
    on_event: OnEvent,
    roles: RunServer | None = None,
    *,
    recovered: int = 0,
    ask_again_s: float = ASK_AGAIN_S,
) -> AsyncIterator[RunEngines]:
    """Opens the pool once it has all own engines, or one of other hosts; engines also join by `roles`.

    `recovered` is the newest Version of the run so far. Raises `ChildDied` when an engine cannot be started or kept.
    Raises `ConfigError` for a remote engine that lacks what is needed, and `EngineUnavailable` when no remote engine
    answers.
    """
    config, model_dir = prepared.config, prepared.model_dir
    engine, replays = config.engine, config.train.router_replay
    sizes, routers = sizes_of(model_dir), router_experts(model_dir) if replays else {}
    rules = AnswerRules(sizes.vocab_size or MOST_TOKENS, replays, prepared.sampling.records_kept)
    rules.experts, rules.chosen = tuple(routers.values()), sizes.num_experts_per_tok
    at_once = WAVE_SHARE if config.asynchrony.max_staleness else 1.0  # without staleness no engine samples meanwhile
    pool = EnginePool(initial=model_dir, recovered=recovered, rules=rules, on_event=on_event, at_once=at_once)
    kept, first = RunEngines(prepared, pool, on_event, ask_again_s), asyncio.Event()

    @asynccontextmanager
    async def joined(role: EngineRole, worker: LeasedWorker) -> AsyncIterator[None]:
        """Entered once an engine serves the newest weights, left once its answers continue elsewhere."""
        lent = PullingEngine(role.url, token=role.token)
        try:
            await check_records(lent, prepared.sampling, routing=replays)
        except ConfigError as error:
            raise NotWanted(str(error)) from error
        finally:
            await lent.aclose()
        async with joined_engine(pool, role, worker):
            first.set()
            yield

    keep = kept.keep_remote if engine.urls else kept.keep_own
    ready = {name: asyncio.Event() for name in engine.urls or _own_names(engine.count)}
    try:
        async with asyncio.TaskGroup() as tasks:
            keeping = [tasks.create_task(keep(name, event), name=f"keeping {name}") for name, event in ready.items()]
            if roles is not None:
                roles.open(EngineRole, joined)
            for event in ready.values():
                await event.wait()
            if not ready:
                on_event("waiting for: shoal engine join")
                await first.wait()
            if not pool.replicas:
                raise EngineUnavailable("; ".join(kept.failures))
            for failure in kept.failures:
                on_event(failure)
            keeping.append(tasks.create_task(pool.watch(), name="watching the engines"))
            try:
                yield kept
            finally:  # before the keepers take leave of engines, which may be stopped
                if roles is not None:
                    roles.close(EngineRole)
                await pool.aclose()
            for task in keeping:
                task.cancel()
    finally:
        await pool.aclose()


@asynccontextmanager
async def joined_engine(pool: EnginePool, role: EngineRole, worker: LeasedWorker) -> AsyncIterator[None]:
    """Entered once clients sample from an engine of another host, left once others answer its requests."""
    await pool.join(worker.name, PullingEngine(role.url, token=role.token))
    try:
        yield
    finally:
        await pool.leave(worker.name)
