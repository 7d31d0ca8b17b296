"""Training builds the parts of a run, joins them in one TaskGroup, and takes them down: no other file knows them all.

    engine process <--HTTP-- main process --frames--> trainer process
                                  |------frames--> reward workers

An engine that ends is started again (engines.py). When any other part ends unasked, the run ends with a sentence that
names it; `--resume` continues from the log.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import uvloop

from shoal.config import Config
from shoal.config.credentials import refuse_masked
from shoal.errors import ChildDied, ConfigError, RunDirError
from shoal.experience.buffer import Buffer
from shoal.experience.schema import RunMeta
from shoal.interfaces import Engine, Exchange, Scorer
from shoal.net.process import Child, cores
from shoal.observe.metrics import Record, Trackers, read_records, trackers_of
from shoal.plugins import source_hash
from shoal.rollout.evaluation import evaluation
from shoal.rollout.single_turn import SingleTurn
from shoal.run.assemble_rollouts import orchestrator, own_scorer, playing
from shoal.run.checks import check_start
from shoal.run.engines import EngineSettings, OnEvent, engines
from shoal.run.join_swarm import swarm_node
from shoal.run.loop import PARITY_BOUND_NATS, LoopDeps, TrainLoop
from shoal.run.plan import Prepared, changed_settings, own_mathematics, prepare, write_resolved
from shoal.run.recovery import open_buffer, recover
from shoal.run.standstill import OwnEngines, report_waits, watch_run
from shoal.run.totals import RunTotals
from shoal.sandbox.runner import in_use
from shoal.trainer.worker import TrainerProcess
from shoal.types import Sampling, Split
from shoal.weights.store import FILE, WeightStore

PARITY_TOKENS = 24
QUEUED_GROUPS = 1.25  # times the groups that fill the engine: it must never wait for the next

Listener: TypeAlias = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Figures of a run. Rewards are means over its first and its last tenth; times are of the last process."""

    accuracy_before: float
    accuracy_after: float
    greedy_before: float
    greedy_after: float
    eval_reward_before: float
    eval_reward_after: float
    """Mean reward of the held-out questions, sampled."""
    reward_first: float
    reward_last: float
    wall_s: float
    steps: int
    samples_per_s: float
    staleness_max: int
    parity: float
    run_dir: str
    warning: str
    """Reason why the run may have learned nothing; empty without a sign of it."""


def run_training(config: Config, *, resume: bool = False, listeners: Sequence[Listener] = ()) -> RunOutcome:
    """Runs a whole training run; each listener gets every metrics record. Raises a `ShoalError`."""
    refuse_masked(config.model_dump(mode="json"))
    check_start(config, resume=resume)
    with prepare(config) as prepared:
        return uvloop.run(train(config, prepared, resume=resume, listeners=listeners))


def run_evaluation(config: Config) -> dict[str, object]:
    """Measures the configured model's held-out accuracy, without training."""
    with prepare(config, trains=False) as prepared, tempfile.TemporaryDirectory() as logs:
        return uvloop.run(_evaluate(config, prepared, Path(logs)))


@contextmanager
def nothing_left_behind(run_dir: Path, buffer: Buffer) -> Iterator[None]:
    """Removes a new run's directory when the block fails before the first group was started.

    Only the process with the open log may do so: any other might remove a run in progress.
    """
    try:
        yield
    except BaseException:
        if not any(counts.started for counts in buffer.counts.values()):
            shutil.rmtree(run_dir, ignore_errors=True)
        raise


@dataclass(frozen=True, slots=True)
class Threads:
    """Cores of each computing process."""

    engine: int
    trainer: int


def compute_threads() -> Threads:
    """Half of the cores for the engine and half for the trainer."""
    half = max(1, cores() // 2)
    return Threads(half, half)


async def train(
    config: Config,
    prepared: Prepared,
    *,
    resume: bool = False,
    listeners: Sequence[Listener] = (),
    scorer: Scorer | None = None,
    single_turn: type[SingleTurn] = SingleTurn,
    threads: Threads | None = None,
    exchange: Exchange | None = None,
) -> RunOutcome:
    """Trains to the configured number of steps and evaluates before and after.

    `scorer` replaces the worker processes, `single_turn` the runner of tasks, and `exchange` the servers of the swarm.
    """
    threads = threads or compute_threads()
    run_dir = Path(config.run_dir)
    async with AsyncExitStack() as stack:
        buffer, trackers = _open_run_dir(config, run_dir, stack, listeners, resume=resume)
        log, version = run_dir / "logs" / "trainer.log", buffer.recovered.version
        trainer_child = await stack.enter_async_context(
            TrainerProcess.child(log, threads.trainer, prepared.devices.ranks)
        )

        def on_event(how: str) -> None:
            trackers.log_event("engine_lost", reason=how)

        own = OwnEngines()
        served = serving(
            config,
            prepared,
            run_dir,
            scorer=scorer,
            single_turn=single_turn,
            threads=threads,
            recovered=version,
            on_event=on_event,
            own=own,
        )
        engine, answering = await stack.enter_async_context(served)
        trainer = await start_trainer(trainer_child, config, prepared, threads)
        eval_tasks = [prepared.service.draw(Split.EVAL, index) for index in range(config.eval.questions)]
        membership = swarm_node(config, prepared, run_dir, answering.scorer, exchange, apart=scorer is None)
        node = await stack.enter_async_context(membership)
        sampling = sampling_of(config, prepared)
        runner = await stack.enter_async_context(playing(config, prepared, engine, answering, sampling))
        store = WeightStore(run_dir / "weights")
        parts = LoopDeps(config, run_dir, engine, trainer, buffer, store, answering, runner, eval_tasks, trackers, node)
        return await _run_parts(parts, prepared, trainer_child, own)


def _open_run_dir(
    config: Config, run_dir: Path, stack: AsyncExitStack, listeners: Sequence[Listener], *, resume: bool
) -> tuple[Buffer, Trackers]:
    """Opens the run directory with its records; the stack closes it, or removes a run that never began."""
    buffer = open_buffer(run_dir, run_meta(config), max_running=_groups_at_once(config), resume=resume)
    stack.push_async_callback(buffer.close)
    if not resume:
        stack.enter_context(nothing_left_behind(run_dir, buffer))
    changed = changed_settings(config, run_dir)
    write_resolved(config, run_dir)
    trackers = trackers_of(config.metrics, run_dir, listeners)
    stack.callback(trackers.close)
    buffer.on_locked(partial(_report_lock, trackers))
    stack.callback(buffer.on_locked, lambda locked: None)
    if changed:
        trackers.log_event("settings_changed", settings=", ".join(changed))
    if trackers.prometheus_port is not None:
        trackers.log_event("prometheus", url=f"http://127.0.0.1:{trackers.prometheus_port}/metrics")
    return buffer, trackers


def _report_lock(trackers: Trackers, locked: bool) -> None:
    """Reports that another program's write holds the run up, and later that the run continues."""
    if locked:
        trackers.log_event("log_locked", reason="another program writes log.sqlite; the run goes on when it is done")
    else:
        trackers.log_event("log_unlocked")


def _groups_at_once(config: Config) -> int:
    """Groups that fill the engine, and a few more."""
    sequences = config.engine.max_running * (len(config.engine.urls) or config.engine.count)
    return max(ceil(QUEUED_GROUPS * sequences / config.rollout.group_size), 1)


async def start_trainer(child: Child, config: Config, prepared: Prepared, threads: Threads) -> TrainerProcess:
    """Starts the trainer with the model loaded."""
    trainer = TrainerProcess(child)
    await trainer.start(
        prepared.model_dir,
        config.model,
        config.train,
        temperature=config.rollout.temperature,
        threads=threads.trainer,
        max_tokens=config.rollout.max_tokens,
    )
    return trainer


@asynccontextmanager
async def serving(
    config: Config,
    prepared: Prepared,
    run_dir: Path,
    *,
    scorer: Scorer | None = None,
    single_turn: type[SingleTurn] = SingleTurn,
    threads: Threads | None = None,
    recovered: int = 0,
    on_event: OnEvent = lambda how: None,
    own: OwnEngines | None = None,
) -> AsyncIterator[tuple[Engine, SingleTurn]]:
    """Starts the engines as one, a scorer, and the runner over both; `on_event` gets the loss of an engine.

    `recovered` is the newest Version that engines may serve already.
    """
    sampling = sampling_of(config, prepared)
    settings = EngineSettings(
        config.engine,
        config.model,
        prepared.model_dir,
        prepared.max_model_len,
        sampling,
        (threads or compute_threads()).engine,
        run_dir / "logs",
        run_dir / "weights",
        prepared.devices.engines,
        recovered,
    )
    async with AsyncExitStack() as stack:
        if scorer is None:
            scorer = await stack.enter_async_context(own_scorer(config, prepared, run_dir / "logs" / "reward.log"))
        pool = await stack.enter_async_context(engines(settings, on_event, own))
        yield pool, single_turn(pool, prepared.renderer, scorer, sampling)


async def _run_parts(parts: LoopDeps, prepared: Prepared, trainer: Child, own: OwnEngines) -> RunOutcome:
    """Recovers, checks parity, evaluates, trains, and evaluates again."""
    began_s = time.monotonic()
    recovered = parts.buffer.recovered
    first_step = 0 if recovered.last_step is None else recovered.last_step + 1
    loop = TrainLoop(parts, first_step=first_step, version=recovered.version)
    if first_step:
        loop.totals = RunTotals.earlier(read_records(parts.run_dir / "metrics.jsonl"), first_step)
    await recover(parts, loop)
    parity = await logprob_mismatch(parts, prepared)
    parts.trackers.log_event("parity", mismatch=parity)
    parts.trackers.log_event("sandbox", backend=await asyncio.to_thread(in_use))
    await loop.evaluate(first_step)
    with report_waits():
        trained_s = await _train_and_evaluate(parts, prepared, loop, trainer, own)
    _write_model(prepared.model_dir, parts)
    totals, tenth = loop.totals, max(1, len(loop.totals.rewards) // 10)
    return RunOutcome(
        accuracy_before=totals.evals[0]["sampled"],
        accuracy_after=totals.evals[-1]["sampled"],
        greedy_before=totals.evals[0]["greedy"],
        greedy_after=totals.evals[-1]["greedy"],
        eval_reward_before=totals.evals[0]["sampled_reward"],
        eval_reward_after=totals.evals[-1]["sampled_reward"],
        reward_first=fmean(totals.rewards[:tenth] or [0.0]),
        reward_last=fmean(totals.rewards[-tenth:] or [0.0]),
        wall_s=time.monotonic() - began_s,
        steps=max(first_step, parts.config.train.steps),
        samples_per_s=totals.samples / trained_s,
        staleness_max=totals.staleness_max,
        parity=parity,
        run_dir=str(parts.run_dir),
        warning=loop.learning.warning,
    )


async def _train_and_evaluate(
    parts: LoopDeps, prepared: Prepared, loop: TrainLoop, trainer: Child, own: OwnEngines
) -> float:
    """Trains the remaining steps with all that runs beside them; returns the seconds taken."""
    began_s = time.monotonic()
    drawing_groups = orchestrator(parts.config, prepared, parts.runner, parts.buffer, parts.trackers)
    async with asyncio.TaskGroup() as tasks:
        drawing = tasks.create_task(drawing_groups.run(), name="orchestrator")
        background = [
            drawing,
            tasks.create_task(_watch(trainer), name="trainer process"),
            tasks.create_task(loop.serve_versions(), name="serving versions"),
            tasks.create_task(loop.watch_engine(), name="watching the engine"),
            tasks.create_task(watch_run(parts, loop, trainer, own), name="watching for standstills"),
        ]
        if parts.swarm is not None:
            parts.buffer.on_finished(parts.swarm.offer)
            background.append(tasks.create_task(parts.swarm.run(), name="swarm"))
        await loop.run(tasks)
        trained_s = time.monotonic() - began_s
        drawing.cancel()  # what it has in flight must not slow the evaluation
        await loop.evaluate(parts.config.train.steps)
        for task in background:
            task.cancel()
    return trained_s


async def logprob_mismatch(parts: LoopDeps, prepared: Prepared) -> float:
    """Mean |difference| in nats between the logprobs of engine and trainer, on answers just sampled.

    Raises `ConfigError` above the bound of the dtype: importance ratios would measure the software, not the policy.
    """
    sampling = Sampling(PARITY_TOKENS, stop_token_ids=prepared.renderer.stop_token_ids, seed=parts.config.seed)
    rows, drawn = [], []
    for index in range(4):
        prompt_ids = prepared.renderer.prompt_ids(prepared.service.draw(Split.EVAL, index).messages)
        for completion in await parts.engine.generate(prompt_ids, sampling, n=2):
            rows.append([*prompt_ids, *completion.token_ids])
            drawn.append(completion.logprobs)
    computed = await parts.trainer.logprobs(rows)
    differences = [
        abs(a - b)
        for ours, theirs in zip(computed, drawn, strict=True)
        for a, b in zip(ours[-len(theirs) :], theirs, strict=True)
    ]
    mismatch = fmean(differences)
    bound = PARITY_BOUND_NATS[parts.config.model.dtype]
    if not mismatch <= bound:  # nan is no agreement either
        raise ConfigError(
            f"engine and trainer disagree about the same tokens: mean |logprob difference| {mismatch:.2e} nats, "
            f"expected at most {bound:.0e}; check that both load the same model in the same dtype"
        )
    return mismatch


async def _watch(child: Child) -> None:
    """Ends the run when a child ends."""
    raise ChildDied(str(await child.died()))


async def _evaluate(config: Config, prepared: Prepared, folder: Path) -> dict[str, object]:
    tasks = [prepared.service.draw(Split.EVAL, index) for index in range(config.eval.questions)]
    async with (
        serving(config, prepared, folder) as (engine, single_turn),
        playing(config, prepared, engine, single_turn, sampling_of(config, prepared)) as runner,
    ):
        evaluated = await evaluation(tasks, runner)
    why = {"unscored_reason": evaluated.failure} if evaluated.failure else {}
    return {**evaluated.values, **why, "model": str(prepared.model_dir)}


def run_meta(config: Config) -> RunMeta:
    """Part of a configuration that the log keeps."""
    return RunMeta(
        max_staleness=config.asynchrony.max_staleness,
        late=config.asynchrony.late,
        groups_per_step=config.train.groups_per_step,
        push_every=config.train.push_every,
        own_code=" ".join(f"{name}@{source_hash(field, name)}" for field, name in own_mathematics(config).items()),
    )


def sampling_of(config: Config, prepared: Prepared) -> Sampling:
    rollout = config.rollout
    return Sampling(
        rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=prepared.renderer.stop_token_ids,
        seed=config.seed,
    )


def _write_model(model_dir: Path, parts: LoopDeps) -> None:
    """Writes the trained model as a Hugging Face directory: settings and tokenizer of the original, last weights.

    Adapters are merged into these weights, and `adapter/` has them by themselves.
    """
    try:
        _copy_model(model_dir, parts.run_dir)
    except OSError as error:
        raise RunDirError(f"{parts.run_dir / 'model'} cannot be written: {error}; free space, then --resume") from error


def _copy_model(model_dir: Path, run_dir: Path) -> None:
    target = run_dir / "model"
    shutil.copytree(model_dir, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*"))
    newest = max((run_dir / "weights").glob("v*[0-9]"), key=lambda path: int(path.name[1:]))
    shutil.copyfile(newest / FILE, target / FILE)
    adapters = sorted(newest.glob("adapter_*"))
    for file in adapters:
        (run_dir / "adapter").mkdir(exist_ok=True)
        shutil.copyfile(file, run_dir / "adapter" / file.name)
