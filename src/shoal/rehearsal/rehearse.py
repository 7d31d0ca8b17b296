"""A rehearsal joins the real parts of a run with rehearsed engines, trainer and scorer, on a virtual clock.

Orchestrator, gate, buffer, log, pool, policy, Versions, checkpoints and loop are those of `run`, unchanged.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from shoal.engine.pool.engine_pool import EnginePool
from shoal.experience.buffer import Buffer
from shoal.model.chat_template import ChatRenderer
from shoal.observe.metrics import JsonlTracker, Trackers
from shoal.rehearsal.clock import run_virtual
from shoal.rehearsal.engine import RehearsedEngine
from shoal.rehearsal.scene import Rehearsed, Scene, Spot
from shoal.rehearsal.trainer import PROMPT_IDS, RehearsedRenderer, RehearsedScorer, RehearsedTasks, RehearsedTrainer
from shoal.rollout.evaluation import held_out_tasks
from shoal.rollout.single_turn import SingleTurn
from shoal.run.engines import RunEngines
from shoal.run.loop import RunParts, TrainLoop
from shoal.run.parts import orchestrator
from shoal.run.policy import Policy
from shoal.run.prepare import Prepared
from shoal.run.run_dir import groups_at_once, run_meta
from shoal.tasks.mixture import Mixture
from shoal.types import seed_for
from shoal.weights.store import WeightStore

LOOKS_PER_STEP = 8
"""Looks at engines within the expected seconds of a step."""


def rehearse(scene: Scene) -> Rehearsed:
    """Runs a scene from its first step."""
    with TemporaryDirectory(prefix="shoal-rehearsal-") as folder:
        return run_virtual(_rehearsed(scene, Path(folder)))


async def _rehearsed(scene: Scene, run_dir: Path) -> Rehearsed:
    from shoal.run.training import train_and_evaluate  # imports all that a run may need

    seen = Rehearsed()
    loop = asyncio.get_running_loop()
    buffer = Buffer.in_memory(run_meta(scene.config), max_running=groups_at_once(scene.config))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(buffer.close)
        tracker = JsonlTracker(run_dir / "metrics.jsonl", loop.time)
        trackers = stack.enter_context(closing(Trackers(tracker, listeners=[seen.records.append])))
        pool, engines = await stack.enter_async_context(opened_pool(scene, run_dir, seen))
        trainer = RehearsedTrainer(scene.trainer, scene.prompt_tokens)
        policy = await stack.enter_async_context(aclosing(policy_of(scene, run_dir, buffer, pool, trainer, trackers)))
        eval_tasks, _ = held_out_tasks(policy.prepared.service, scene.config.held_out_questions)
        poll_s = scene.step_s / LOOKS_PER_STEP
        parts = RunParts(run_dir, eval_tasks, trackers, clock=loop.time, poll_s=poll_s)
        training = TrainLoop(policy, parts, first_step=0)
        with suppress(TimeoutError):
            async with asyncio.timeout(scene.seconds):
                await train_and_evaluate(policy, parts, training)
        seen.seconds = loop.time()
        for counts in buffer.counts.values():
            for reason, count in (*counts.dropped.items(), *counts.failed.items()):
                seen.dropped[reason] = seen.dropped.get(reason, 0) + count
        seen.sampled_tokens = sum(one.sampled for one in engines)
        seen.computed_again = sum(one.prefilled for one in engines)
        seen.engine_busy_s = sum(one.busy_s for one in engines)
    return seen


def policy_of(
    scene: Scene, run_dir: Path, buffer: Buffer, pool: EnginePool, trainer: RehearsedTrainer, trackers: Trackers
) -> Policy:
    """The policy of a run over rehearsed parts."""
    config = scene.config.model_copy(update={"run_dir": str(run_dir)})
    tasks = [RehearsedTasks(task.name) for task in config.tasks]
    renderer = cast(ChatRenderer, RehearsedRenderer())  # the parts below use no more of it than `Renderer` has
    mixture = Mixture(tasks, [task.weight for task in config.tasks])
    prepared = Prepared(config, run_dir, renderer, mixture, config.rollout.max_tokens + PROMPT_IDS, PROMPT_IDS)
    scorer = RehearsedScorer(scene.score_s, scene.scorers, scene.solved)
    runner = SingleTurn(pool, renderer, scorer, prepared.sampling)
    draw = orchestrator(prepared, runner, buffer, trackers.log_event).run
    store, engines = WeightStore(run_dir / "weights"), RunEngines(prepared, pool, lambda how: None)
    return Policy(config, trainer, None, prepared, pool, runner, scorer, buffer, store, engines, draw)


@asynccontextmanager
async def opened_pool(
    scene: Scene, run_dir: Path, seen: Rehearsed
) -> AsyncIterator[tuple[EnginePool, list[RehearsedEngine]]]:
    """A real pool of rehearsed engines, of which spot machines take some away."""
    pool = EnginePool(initial=run_dir, check_every_s=max(scene.step_s / LOOKS_PER_STEP, 1.0))
    engines: list[RehearsedEngine] = []

    async def join(name: str) -> RehearsedEngine:
        limit = scene.config.rollout.max_tokens + scene.prompt_tokens
        engine = RehearsedEngine(scene.engine, scene.length, scene.unit, scene.prompt_tokens, limit)
        engines.append(engine)
        await pool.join(name, engine)
        return engine

    async def interrupted(name: str, engine: RehearsedEngine, spot: Spot) -> None:
        rng = random.Random(seed_for("spot", scene.seed, name))
        while True:
            await asyncio.sleep(rng.expovariate(1 / spot.every_s))
            seen.interruptions += 1
            if not spot.notice:
                engine.kill()
            await pool.leave(name)
            await asyncio.sleep(spot.back_s)
            engine = await join(name)

    async with asyncio.TaskGroup() as tasks:
        first = {f"engine-{index}": await join(f"engine-{index}") for index in range(scene.engines)}
        running = [tasks.create_task(pool.watch(), name="watching the engines")]
        if scene.spot is not None:
            waits = (partial(interrupted, name, engine, scene.spot) for name, engine in first.items())
            running += [tasks.create_task(wait(), name="spot machine") for wait in waits]
        try:
            yield pool, engines
        finally:
            for task in running:
                task.cancel()
            await pool.aclose()
