"""Training runs a policy with its log, schedule and background tasks in one TaskGroup, and takes all of them down.

    engine process <--HTTP-- main process --frames--> trainer process
                                  |------frames--> reward workers

An engine that ends is started again (engines.py). When any other part ends unasked, the run ends with a sentence that
names it; `--resume` continues from the log.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean

from shoal.config import Config
from shoal.config.credentials import refuse_masked
from shoal.errors import ChildDied, ConfigError, WorkerLost
from shoal.interfaces import Exchange, Scorer, Worker
from shoal.net.process import cores
from shoal.observe.metrics import read_records, stage
from shoal.rollout.comparison import certified
from shoal.rollout.constant_answers import paid_constants
from shoal.rollout.evaluation import held_out_tasks
from shoal.rollout.single_turn import SingleTurn
from shoal.run.backup import back_up, check_backup, keep_backup
from shoal.run.blocking import run_blocking, saved_at_stop
from shoal.run.engine_mismatch import differences
from shoal.run.join_swarm import report_connection
from shoal.run.loop import RunParts, TrainLoop
from shoal.run.machine.devices import Threads
from shoal.run.parts import opened_policy, swarm_node
from shoal.run.policy import Policy
from shoal.run.prepare import Prepared, check_start, prepare
from shoal.run.recovery import recover
from shoal.run.result import Result, RunTotals
from shoal.run.roles import launched
from shoal.run.run_dir import Listener, opened_run
from shoal.run.standstill import report_waits, watch_progress
from shoal.run.versions import PARITY_BOUND_NATS
from shoal.sandbox.runner import in_use
from shoal.swarm.node import Node
from shoal.types import Sampling, Split
from shoal.weights.store import ADAPTER_FILE, FILE, write_model

PARITY_TOKENS = 24
MOST_RANK_GROUPS = 16
"""Groups of ranks that a run may lose in an hour; it goes on from its log with the next one."""
HOUR_S = 3600.0


class LostGroups:
    """Losses of rank groups in the last hour."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lost_s = clock, deque[float]()

    def may_go_on(self) -> bool:
        """Notes a loss; returns whether a run goes on after it."""
        now_s = self._clock()
        self._lost_s.append(now_s)
        while now_s - self._lost_s[0] >= HOUR_S:
            self._lost_s.popleft()
        return len(self._lost_s) <= MOST_RANK_GROUPS


def train_with_progress(config: Config, *, resume: bool = False) -> Result:
    """Trains as a configuration says and shows the progress. Raises a `ShoalError`."""
    from shoal.observe.progress import LiveProgress

    with LiveProgress(config.train.steps, config.asynchrony.max_staleness) as shown:
        return run_training(config, resume=resume, listeners=[shown.update])


def run_training(config: Config, *, resume: bool = False, listeners: Sequence[Listener] = ()) -> Result:
    """Runs a whole training run; each listener gets every metrics record. Raises a `ShoalError`."""
    refuse_masked(config.model_dump(mode="json"))
    check_start(config, resume=resume)

    def show(words: str) -> None:
        for listener in listeners:
            listener(stage(words))

    show("checking model, tasks and rewards")
    lost = LostGroups()
    with launched(config, show) as token:
        while True:
            try:
                with prepare(config, token=token) as prepared:
                    return run_blocking(train(prepared, resume=resume, listeners=listeners))
            except* WorkerLost:
                if not lost.may_go_on():
                    raise
                resume = (Path(config.run_dir) / "log.sqlite").is_file()


async def train(
    prepared: Prepared,
    *,
    resume: bool = False,
    listeners: Sequence[Listener] = (),
    scorer: Scorer | None = None,
    single_turn: type[SingleTurn] = SingleTurn,
    threads: Threads | None = None,
    exchange: Exchange | None = None,
) -> Result:
    """Trains to the configured number of steps and evaluates before and after.

    `scorer` replaces the worker processes, `single_turn` the runner of tasks, and `exchange` the swarm's servers.
    """
    config, run_dir = prepared.config, Path(prepared.config.run_dir)
    async with AsyncExitStack() as stack:
        opened = stack.enter_async_context
        buffer, trackers = await opened(opened_run(config, listeners, resume=resume))
        for note in prepared.service.notes:
            trackers.log_event("left_out", reason=note)
        trackers.stage("starting engines and reward workers")
        if config.checkpoint.backup:
            await asyncio.to_thread(check_backup, run_dir, config.checkpoint.backup)
        policy = await opened(
            opened_policy(
                prepared,
                buffer,
                scorer=scorer,
                single_turn=single_turn,
                threads=threads,
                recovered=buffer.recovered.version,
                resume=resume,
                on_event=trackers.log_event,
                on_stage=trackers.stage,
            )
        )
        eval_tasks, few = held_out_tasks(prepared.service, config.held_out_questions)
        if few:
            trackers.log_event("few_questions", reason=few)
        node = await opened(swarm_node(prepared, policy.scorer, apart=scorer is None, exchange=exchange))
        return await _run(policy, RunParts(run_dir, eval_tasks, trackers, node))


async def _run(policy: Policy, parts: RunParts) -> Result:
    """Recovers, checks parity, evaluates, trains, and evaluates again."""
    began_s, config, prepared = time.monotonic(), policy.config, policy.prepared
    first_step = policy.buffer.recovered.first_step
    totals = RunTotals.earlier(read_records(parts.run_dir / "metrics.jsonl"), first_step) if first_step else RunTotals()
    loop = TrainLoop(policy, parts, first_step=first_step, totals=totals)
    if first_step:
        parts.trackers.stage("bringing the trainer to the log's end")
    await recover(policy, parts.run_dir, parts.trackers)
    parts.trackers.stage("comparing the logprobs of engine and trainer")
    parity = await logprob_mismatch(policy, same_weights=first_step % config.train.push_every == 0)
    parts.trackers.log_event("parity", mismatch=parity)
    parts.trackers.log_event("sandbox", backend=await asyncio.to_thread(in_use))
    devices = prepared.devices
    parts.trackers.log_event("machine", cores=cores(), gpus=len({*devices.engines, *devices.ranks}))
    if not first_step:
        for reason in await paid_constants(parts.eval_tasks, policy.scorer):
            parts.trackers.log_event("pays_a_constant", reason=reason)
    parts.trackers.stage(f"answering {len(parts.eval_tasks)} held-out questions, twice")
    await loop.evaluations.run(first_step)
    with report_waits():
        trained_s = await train_and_evaluate(policy, parts, loop)
    newest = max((parts.run_dir / "weights").glob("v*[0-9]"), key=lambda path: int(path.name[1:]))
    write_model(prepared.model_dir, newest, parts.run_dir)
    if config.train.lora.rank:  # a Version has either; in one folder, transformers would add the adapter again
        other = Path("model", FILE) if prepared.version_file == ADAPTER_FILE else Path("adapter", ADAPTER_FILE)
        (parts.run_dir / other.parent).mkdir(exist_ok=True)
        await policy.trainer.write_version(parts.run_dir / other, push=False)
    if backup := config.checkpoint.backup:
        await asyncio.to_thread(back_up, parts.run_dir, backup)
    improvement = await asyncio.to_thread(certified, parts.run_dir)
    tenth = max(1, len(totals.rewards) // 10)
    before, after = totals.evals[0], totals.evals[-1]
    return Result(
        accuracy_before=before["sampled"],
        accuracy_after=after["sampled"],
        greedy_before=before["greedy"],
        greedy_after=after["greedy"],
        eval_reward_before=before["sampled_reward"],
        eval_reward_after=after["sampled_reward"],
        reward_first=fmean(totals.rewards[:tenth] or [0.0]),
        reward_last=fmean(totals.rewards[-tenth:] or [0.0]),
        wall_s=totals.wall_s + time.monotonic() - began_s,
        steps=max(first_step, config.train.steps),
        samples_per_s=totals.samples / (totals.trained_s + trained_s),
        staleness_max=totals.staleness_max,
        parity=parity,
        run_dir=parts.run_dir,
        improvement=improvement.sentence() if improvement else "",
        warning=loop.learning.warning,
    )


async def train_and_evaluate(policy: Policy, parts: RunParts, loop: TrainLoop) -> float:
    """Trains the remaining steps with the background tasks; returns the seconds taken."""
    config = policy.config

    def progress() -> Hashable:
        """Any token, group, step, evaluation, Version or work of the trainer is progress."""
        finished = sum(counts.finished for counts in policy.buffer.counts.values())
        return (*loop.progress, finished, sum(rank.ticks for rank in policy.trainer.ranks))

    def stood_still(reason: str) -> None:
        parts.trackers.log_event("standstill", reason=reason)

    began_s = time.monotonic()
    background = {
        "orchestrator": policy.draw(),
        **{f"trainer rank {i}": _watch(rank) for i, rank in enumerate(policy.trainer.ranks)},
        "loading versions": policy.versions.keep_loaded(),
        "watching the engine": loop.watch.run(),
        "watching for standstills": watch_progress(
            progress, policy.own_engines.helped, stood_still, config.stall_s + config.swarm.wait_s
        ),
    }
    if backup := config.checkpoint.backup:
        background["backup"] = keep_backup(parts.run_dir, backup, parts.trackers)
    if parts.swarm is not None:
        policy.buffer.on_finished = parts.swarm.offer
        background["swarm"] = parts.swarm.run()
        if isinstance(parts.swarm, Node):
            background["watching the swarm"] = report_connection(parts.swarm, parts.trackers.log_event)
    async with asyncio.TaskGroup() as tasks, saved_at_stop(loop.stop):
        running = {name: tasks.create_task(part, name=name) for name, part in background.items()}
        await loop.run(tasks)
        trained_s = time.monotonic() - began_s
        running["orchestrator"].cancel()  # what it has in flight must not slow the evaluation
        await loop.evaluations.run(config.train.steps)
        for task in running.values():
            task.cancel()
    return trained_s


async def _watch(rank: Worker) -> None:
    """Ends the run when a rank ends."""
    raise ChildDied(str(await rank.died()))


async def logprob_mismatch(policy: Policy, *, same_weights: bool = True) -> float:
    """Mean |difference| in nats between the logprobs of engine and trainer, on answers just sampled.

    Raises `ConfigError` where every engine is above the bound of the dtype: importance ratios would measure the
    software, not the policy. An engine above it rests while others are below. Without `same_weights` no bound applies:
    a trainer that resumes between two Versions is ahead of the engines.
    """
    prepared = policy.prepared
    sampling = Sampling(PARITY_TOKENS, stop_token_ids=prepared.renderer.stop_token_ids, seed=policy.config.seed)
    for index in range(4):
        prompt_ids = prepared.renderer.prompt_ids(prepared.service.draw(Split.EVAL, index).messages)
        await policy.engine.generate(prompt_ids, sampling, n=2)
    found = await differences(policy.engine, policy.trainer.logprobs, sampling.temperature, 8)
    mismatches = {name: fmean(each) for name, each in found.items()}
    bound = PARITY_BOUND_NATS[policy.config.model.dtype]
    fine = [nats for nats in mismatches.values() if nats <= bound or not same_weights]  # nan is no agreement either
    if mismatches and not fine:
        raise ConfigError(
            f"engine and trainer disagree about the same tokens: mean |logprob difference| "
            f"{min(mismatches.values()):.2e} nats, expected at most {bound:.0e}; check that both load the same model "
            "in the same dtype"
        )
    for name, nats in mismatches.items() if same_weights else ():
        departs = f"its logprobs differ from the trainer's by {nats:.2e} nats per token, expected at most {bound:.0e}"
        policy.engine.judge(name, departs if not nats <= bound else "")
    return fmean(fine or [0.0])
