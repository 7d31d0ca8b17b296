"""Training runs a policy with its log, schedule and background tasks in one TaskGroup, and takes all of them down.

    engine process <--HTTP-- main process --frames--> trainer process
                                  |------frames--> reward workers

An engine that ends is started again (engines.py). When any other part ends unasked, the run ends with a sentence that
names it; `--resume` continues from the log.
"""

import asyncio
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from shoal.config import Config, refuse_masked
from shoal.errors import ChildDied, ConfigError, WorkerLost
from shoal.experience import checkpoint
from shoal.experience.buffer import Buffer
from shoal.experience.log import newest_groups, snapshot
from shoal.experience.schema import StepRecord
from shoal.interfaces import Exchange, Scorer, Worker
from shoal.net.process import cores
from shoal.observe.metrics import Trackers, read_records, stage, trackers_of
from shoal.rollout.comparison import certified
from shoal.rollout.constant_answers import paid_constants
from shoal.rollout.evaluation import held_out_tasks
from shoal.run.backup import back_up, check_backup, keep_backup, leave_backup
from shoal.run.blocking import run_blocking, saved_at_stop
from shoal.run.engine_watch import differences
from shoal.run.join_swarm import joined_peer, report_connection
from shoal.run.loop import RunParts, TrainLoop
from shoal.run.parts import opened_policy, own_scorer
from shoal.run.policy import PARITY_BOUND_NATS, Policy
from shoal.run.prepare import Prepared, check_start, prepare
from shoal.run.result import Result, RunTotals
from shoal.run.roles import launched, run_token
from shoal.run.run_dir import (
    Listener,
    changed_settings,
    forget_lost_steps,
    groups_at_once,
    open_buffer,
    run_meta,
    write_resolved,
)
from shoal.run.standstill import report_waits, watch_progress
from shoal.sandbox.runner import in_use
from shoal.swarm.node import Node
from shoal.swarm.trust.limits import SCORE_S
from shoal.types import Group, Sampling, Split

PARITY_TOKENS = 24
MOST_RANK_GROUPS = 16
"""Groups of ranks that a run may lose in an hour; it goes on from its log with the next one."""
HOUR_S = 3600.0
MOST_REMEMBERED, MOST_OWN = 4096, 1024
"""Groups of peers and own groups that a resumed run remembers: one of long answers takes 50 ms."""


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
    lost, token, is_launched = LostGroups(), run_token(config), False
    with ExitStack() as roles:
        while True:
            try:
                with prepare(config, token=token) as prepared:
                    if not is_launched:  # roles of Ray stay while groups of ranks come and go
                        roles.enter_context(launched(config, token, show))
                        is_launched = True
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
    exchange: Exchange | None = None,
) -> Result:
    """Trains to the configured number of steps and evaluates before and after.

    An `exchange` replaces the swarm's servers.
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
        on_event, on_stage = trackers.log_event, trackers.stage
        policy = await opened(opened_policy(prepared, buffer, resume=resume, on_event=on_event, on_stage=on_stage))
        eval_tasks, few = held_out_tasks(prepared.service, config.held_out_questions)
        if few:
            trackers.log_event("few_questions", reason=few)
        node = await opened(swarm_node(prepared, policy.scorer, exchange))
        return await _run(policy, RunParts(run_dir, eval_tasks, trackers, node))


@asynccontextmanager
async def opened_run(
    config: Config, listeners: Sequence[Listener], *, resume: bool
) -> AsyncIterator[tuple[Buffer, Trackers]]:
    """Opens the log and the metrics of a run.

    A new run that fails before its first group is removed. Only the process with the open log may do so: any other
    might remove a run in progress.
    """
    run_dir = Path(config.run_dir)
    buffer = open_buffer(run_dir, run_meta(config), max_running=groups_at_once(config), resume=resume)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(buffer.close)
        try:
            changed = changed_settings(config, run_dir)
            lost = forget_lost_steps(run_dir, buffer.recovered.first_step) if resume else 0
            write_resolved(config, run_dir)
            with closing(trackers_of(config.metrics, run_dir, listeners)) as trackers:
                stack.callback(buffer.on_locked, lambda locked: None)
                buffer.on_locked(partial(_report_lock, trackers))
                if lost:
                    reason = f"the log lacks {lost} steps that metrics.jsonl had; they are trained anew"
                    trackers.log_event("steps_lost", reason=reason)
                if changed:
                    trackers.log_event("settings_changed", settings=", ".join(changed))
                yield buffer, trackers
        except BaseException:
            if not resume and not any(counts.started for counts in buffer.counts.values()):
                if backup := config.checkpoint.backup:
                    leave_backup(run_dir, backup)
                shutil.rmtree(run_dir, ignore_errors=True)
            raise


def _report_lock(trackers: Trackers, locked: bool) -> None:
    """Reports that another program's write holds the run up, and later that the run continues."""
    if locked:
        trackers.log_event("log_locked", reason="another program writes log.sqlite; the run goes on when it is done")
    else:
        trackers.log_event("log_unlocked")


@asynccontextmanager
async def swarm_node(prepared: Prepared, scorer: Scorer, exchange: Exchange | None) -> AsyncIterator[Node | None]:
    """Opens the node of a run; None outside of swarms. Raises a `ShoalError`.

    The run's log is open by now. `scorer` is the run's. Peers' answers are scored in a separate worker process, so a
    hanging answer of a peer delays no answer of the run. An `exchange` replaces that of `swarm.servers`.
    """
    config, run_dir = prepared.config, Path(prepared.config.run_dir)
    if not config.swarm.servers and exchange is None:
        yield None
        return
    async with AsyncExitStack() as stack:
        services = list(prepared.environments.values())
        joined = await stack.enter_async_context(joined_peer(config, run_dir, services, exchange))
        if prepared.scorer is None and config.swarm.external_groups:
            shorter_s = min(config.reward.timeout_s, SCORE_S)
            reward = config.reward.model_copy(update={"workers": 1, "timeout_s": shorter_s})
            alone = replace(prepared, config=config.model_copy(update={"reward": reward}))
            log = run_dir / "logs" / "peers.log"
            scorer = await stack.enter_async_context(own_scorer(alone, log))
        yield Node(joined, scorer, prepared.renderer, prepared.max_model_len, known=partial(_known_groups, run_dir))


@contextmanager
def _known_groups(run_dir: Path) -> Iterator[Iterator[Group]]:
    with snapshot(run_dir) as connection:
        yield newest_groups(connection, MOST_OWN, MOST_REMEMBERED)


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
    await policy.write_model(prepared.model_dir, parts.run_dir / "model", parts.run_dir / "adapter")
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
            progress, policy.engines.helped, stood_still, config.stall_s + config.swarm.wait_s
        ),
    }
    if backup := config.checkpoint.backup:
        background["backup"] = keep_backup(parts.run_dir, backup, parts.trackers)
    if parts.node is not None:
        policy.buffer.on_finished = parts.node.offer
        background["swarm"] = parts.node.run()
        background["watching the swarm"] = report_connection(parts.node, parts.trackers.log_event)
    async with asyncio.TaskGroup() as tasks, saved_at_stop(loop.stop):
        running = {name: tasks.create_task(part, name=name) for name, part in background.items()}
        await loop.run(tasks)
        trained_s = time.monotonic() - began_s
        running["orchestrator"].cancel()  # what it has in flight must not slow the evaluation
        await loop.evaluations.run(max(loop.first_step, config.train.steps))
        for task in running.values():
            task.cancel()
    return trained_s


async def _watch(rank: Worker) -> None:
    """Ends the run when a rank ends."""
    raise ChildDied(str(await rank.died()))


async def logprob_mismatch(policy: Policy, *, same_weights: bool = True) -> float:
    """Mean |difference| in nats between the logprobs of engine and trainer, on answers just sampled.

    Raises `ConfigError` where every engine is above the bound of the dtype: importance ratios would measure the
    software, not the policy. An engine above it rests, and others answer. Without `same_weights` no bound applies: a
    trainer that resumes between two Versions is ahead of the engines.
    """
    prepared = policy.prepared
    sampling = Sampling(PARITY_TOKENS, stop_token_ids=prepared.renderer.stop_token_ids, seed=policy.config.seed)
    mismatches, fine = dict[str, float](), list[float]()
    bound = PARITY_BOUND_NATS[policy.config.model.dtype]
    while not fine:
        for index in range(4):
            prompt_ids = prepared.renderer.prompt_ids(prepared.service.draw(Split.EVAL, index).messages)
            await policy.engine.generate(prompt_ids, sampling, n=2)
        found = await differences(policy.engine, policy.trainer.logprobs, sampling.temperature, 8)
        if not found:
            return 0.0
        measured = {name: fmean(each) for name, each in found.items()}
        mismatches |= measured
        fine = [nats for nats in measured.values() if nats <= bound or not same_weights]  # nan is no agreement either
        others = {one.name for one in policy.engine.replicas if not one.left_out} - mismatches.keys()
        if not fine and not others:
            raise ConfigError(
                f"engine and trainer disagree about the same tokens: mean |logprob difference| "
                f"{min(mismatches.values()):.2e} nats, expected at most {bound:.0e}; check that both load the same "
                "model in the same dtype"
            )
        for name, nats in measured.items() if same_weights else ():
            departs = (
                f"its logprobs differ from the trainer's by {nats:.2e} nats per token, expected at most {bound:.0e}"
            )
            policy.engine.judge(name, departs if not nats <= bound else "")
    return fmean(fine)


async def recover(policy: Policy, run_dir: Path, trackers: Trackers) -> None:
    """Loads the newest intact checkpoint and repeats every recorded step after it; engines get the newest Version."""
    recovered, damages = policy.buffer.recovered, list[str]()
    saved = await asyncio.to_thread(checkpoint.intact, run_dir, damages.append)
    for damage in damages:
        trackers.log_event("checkpoint_damaged", reason=damage)
    if saved is not None:
        await policy.trainer.load(saved.path)
    # Versions that an ended run left: a resume needs no more disk than a run.
    await asyncio.to_thread(policy.versions.store.keep_only, recovered.version)
    for record in await policy.buffer.steps_after(saved.step if saved else -1):
        if not await _replay(policy, record):
            trackers.log_event("replay_not_exact", step=record.step + 1)
    if recovered.version > 0:
        await policy.versions.recover(recovered.version)
        counts = {"waiting": recovered.waiting, "begun": len(recovered.begun), "interrupted": recovered.interrupted}
        trackers.log_event("resumed", step=recovered.first_step, **{name: float(n) for name, n in counts.items()})


async def _replay(policy: Policy, record: StepRecord) -> bool:
    """Repeats a step that the checkpoint lacks, on the same groups, with a new Version if it had one.

    False when the log has other weights of the step.

    Only the weights that engines will load are written: each Version in turn would fill the disk.
    """
    stats = await policy.repeat(record, await policy.buffer.groups_of(record.step))
    if record.version_after == policy.buffer.recovered.version != record.version:
        await policy.versions.write(record.version_after)
    elif record.version_after != record.version:
        await policy.trainer.write_version(None)
    return await policy.buffer.record_weights(record.step, stats.weights)
