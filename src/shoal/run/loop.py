"""The training loop takes groups, trains them, and brings each new Version to the engines.

    step         consumes groups; waits for the buffer, then for the trainer
    write        has the trainer write a Version, and records it in the log; waits for nothing else
    load         has engines load the newest Version; waits for them; unblocks admission
    evaluation   runs beside the others and waits for the engine only

Generation continues during each of them. `recover` brings the loop to where an ended run stopped: the log is the truth,
and a checkpoint saves repeated computation.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from shoal.config import Config
from shoal.engine import canary
from shoal.experience import checkpoint
from shoal.experience.buffer import Buffer
from shoal.experience.held_out import HeldOutAnswer, write_answers
from shoal.experience.schema import StepRecord
from shoal.interfaces import Engine, EngineInfo, Runner, Swarm
from shoal.observe.metrics import Trackers
from shoal.observe.token_files import TokensFiles
from shoal.rollout.concurrency import Concurrency
from shoal.rollout.evaluation import evaluation
from shoal.rollout.single_turn import SingleTurn
from shoal.run.dynamic_sampling import informative_groups
from shoal.run.learning import Collapse, Learning, was_cut
from shoal.run.pacing import CheckpointDue, EvaluationCost
from shoal.run.prepared import version_file
from shoal.run.result import RunTotals, lost_groups, scorer_values, stats_values, task_values
from shoal.run.teacher import TextTeacher
from shoal.swarm.external import external_rows
from shoal.trainer.advantage import is_informative, mask_tokens, returns_of, step_samples
from shoal.trainer.messages import StepStats
from shoal.trainer.packing import mixed
from shoal.trainer.worker import TrainerProcess
from shoal.types import Group, Sample, Task
from shoal.weights.store import WeightStore, WrittenVersion

POLL_S = 0.5
MOST_GROUPS = 16
"""Multiple of the groups that fill the engine: most rollouts may wait for tools."""
PARITY_BOUND_NATS = {"float32": 1e-3, "bfloat16": 0.1}  # of mean |difference| between engine and trainer
CANARY_TOKENS = 64


@dataclass(frozen=True, slots=True)
class LoopDeps:
    """Dependencies of the loop."""

    config: Config
    run_dir: Path
    engine: Engine
    trainer: TrainerProcess
    buffer: Buffer
    store: WeightStore
    single_turn: SingleTurn
    runner: Runner
    eval_tasks: Sequence[Task]
    trackers: Trackers
    swarm: Swarm | None = None
    teacher: TextTeacher | None = None


class TrainLoop:
    """Owner of step and version. Invariant: the log records a step before engines load the weights that came of it."""

    def __init__(self, parts: LoopDeps, *, first_step: int, version: int) -> None:
        self._parts = parts
        self._config = parts.config
        self._returns = returns_of(parts.config.train, parts.config.rollout.max_tokens)
        self.learning = Learning(self._returns, parts.config.train.compares_within_groups)
        self.first_step = first_step
        self.version = version
        self.totals = RunTotals()
        self._engine_info: EngineInfo | None = None
        self._engine_shares: list[float] = []  # busy ones, since the step before
        self._newest: WrittenVersion | None = None  # which engines have loaded, or will load
        self._to_load = asyncio.Event()
        self._loaded = asyncio.Event()
        self._loaded.set()
        self._evaluation: asyncio.Task[None] | None = None
        self._archiving: asyncio.Task[None] | None = None
        self._archived = -1
        self._saved: int | None = None  # the step of saved files that no checkpoint has yet
        self._tokens_files = TokensFiles(parts.run_dir)
        self._busy_s = 0.0
        self._load_s = 0.0  # of the newest loaded Version
        self._held_back: list[bool] = []  # at each look since the step before
        self._waited_s: dict[str, float] = defaultdict(float)  # by name of metrics, since the step before
        self._recorded_s = time.monotonic()
        self._counted = lost_groups(parts.buffer)
        self._collapse = Collapse(parts.config.train.lr)
        self._checkpoint_due = CheckpointDue(parts.config.checkpoint.every_steps)
        self._evaluation_cost = EvaluationCost(parts.config.held_out_questions)

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Trains the remaining steps, then waits until engines have loaded the last Version."""
        train = self._config.train
        self._busy_s, self._recorded_s, every = 0.0, time.monotonic(), self._config.eval.every_steps
        self._waited_s.clear()  # what came before belongs to no step
        self._evaluation_cost.begin()
        for step in range(self.first_step, train.steps):
            last = step == train.steps - 1
            await self._step(step, new_version=last or (step + 1) % train.push_every == 0)
            await self._seal(tasks)  # of the step before
            if last or self._checkpoint_due.after(step):
                await self._save(step)
                if last or not self._config.checkpoint.asynchronous:
                    await self._seal(tasks)
            if last or (every and (step + 1) % every == 0):
                self._warn("evaluation_costs", step, self._evaluation_cost.trained(every or train.steps))
                if not last and (self._evaluation is None or self._evaluation.done()):
                    self._evaluation = tasks.create_task(self.evaluate(step + 1), name="evaluation")
        for beside in (self._evaluation, self._archiving):
            if beside is not None:
                await beside
        await self._loaded.wait()

    async def load_versions(self) -> None:
        """Has engines load each newest Version, for ever."""
        while True:
            await self._to_load.wait()
            self._to_load.clear()
            written = self._newest
            assert written is not None
            began_s = time.monotonic()
            await self._parts.engine.update_weights(written.version, written.path)
            self._load_s = time.monotonic() - began_s
            self._parts.buffer.on_loaded(written.version)
            self._parts.store.remove_before(written.version)
            if not self._to_load.is_set():
                self._loaded.set()

    async def watch_engine(self) -> None:
        """Polls the engine for ever, and lets more groups run while it has little to do."""
        gate, config = self._parts.buffer.gate, self._parts.config.engine
        concurrency = Concurrency(gate.max_running, MOST_GROUPS * gate.max_running)
        places = config.max_running * (len(config.urls) or config.count or 1)
        while True:
            info = self._engine_info = await self._parts.engine.info()
            self._engine_shares.append(info.busy_share)
            self._held_back.append(gate.accepted + gate.running >= gate.budget)
            most = concurrency.looked(places=places, running=info.running, waiting=info.waiting, groups=gate.running)
            if most != gate.max_running:
                self._parts.buffer.run_at_most(most)
            await asyncio.sleep(POLL_S)

    @property
    def progress(self) -> tuple[int, ...]:
        """Numbers of which at least one changes when anything moves."""
        info = self._engine_info
        tokens = (info.tokens_drawn, info.tokens_prefilled) if info else ()
        return (*tokens, self.version, len(self.totals.rewards), len(self.totals.evals))

    async def evaluate(self, steps_done: int) -> None:
        """Answers held-out questions, sampled as in training and greedy."""
        began_s, first = time.monotonic(), not self.totals.evals
        evaluated = await evaluation(self._parts.eval_tasks, self._parts.runner, self._config.eval.samples, first=first)
        self._evaluation_cost.evaluation_s = time.monotonic() - began_s
        answers = [
            HeldOutAnswer.of(steps_done, task, purpose, position, rollout)
            for task, purpose, rollouts in evaluated.rollouts
            for position, rollout in enumerate(rollouts)
        ]
        await asyncio.to_thread(write_answers, self._parts.run_dir, steps_done, answers)
        self.totals.evals.append(evaluated.values)
        self._parts.trackers.log_eval(steps_done, evaluated.values)
        self._parts.trackers.log_answers(steps_done, [one.values for one in evaluated.answers])
        if evaluated.failure:
            self._parts.trackers.log_event("rollout_failed", reason=evaluated.failure)

    async def recover(self) -> None:
        """Brings the trainer to the log's end: the newest intact checkpoint, then every recorded step after it."""
        parts, recovered = self._parts, self._parts.buffer.recovered
        damages: list[str] = []
        saved = await asyncio.to_thread(checkpoint.intact, parts.run_dir, damages.append)
        for damage in damages:
            parts.trackers.log_event("checkpoint_damaged", reason=damage)
        if saved is not None:
            await parts.trainer.load(saved.path)
        await asyncio.to_thread(parts.store.keep_only, recovered.version)  # a resume needs no more disk than a run
        for record in await parts.buffer.steps_after(saved.step if saved else -1):
            await self._replay(record)
        if recovered.version > 0:
            await self.load_recovered(recovered.version)
            counts = {"waiting": float(recovered.waiting), "interrupted": float(recovered.interrupted)}
            parts.trackers.log_event("resumed", step=self.first_step, **counts)

    async def _replay(self, record: StepRecord) -> None:
        """Repeats a step that the log has but the checkpoint lacks, on the same groups, with a new Version if it had
        one.

        Only the weights that engines will load are written: each Version in turn would fill the disk.
        """
        groups = await self._parts.buffer.groups_of(record.step)
        rows, _ = await self._rows(groups, record.version)
        since_push = record.step % self._config.train.push_every
        await self._parts.trainer.step(list(rows.values()), record.version, since_push)
        if record.version_after == record.version:
            return
        if record.version_after == self._parts.buffer.recovered.version:
            await self._write_version(record.version_after)
        else:
            await self._parts.trainer.write_version(None)

    async def _step(self, step: int, *, new_version: bool) -> None:
        parts, version, train = self._parts, self.version, self._config.train
        take = informative_groups if train.dynamic_sampling else Buffer.take
        with self._waiting("groups_wait_s"):
            async with asyncio.TaskGroup() as both:
                taking = both.create_task(take(parts.buffer, train.groups_per_step, version))
                # While the step waits for groups of its own, the trainer is free to encode those of peers.
                encoding = both.create_task(self._external_groups(version))
        groups, external = taking.result(), encoding.result()
        rows, late_tokens = await self._rows([*groups, *external], version)
        after = version + 1 if new_version else version
        with self._waiting("train_s"):
            async with asyncio.TaskGroup() as both:
                ids = [group.id for group in groups]
                recording = parts.buffer.consumed(step, version, ids, version_after=after, external=external, rows=rows)
                recorded = both.create_task(recording)
                file, taught = self._tokens_files.wanted(step + 1, list(rows)), list(rows.values())
                training = parts.trainer.step(taught, version, step % train.push_every, tokens_file=file)
                trained = both.create_task(training)
        assert recorded.done()
        await asyncio.to_thread(self._tokens_files.prune)
        stats = trained.result()
        self._busy_s += stats.seconds
        if stats.refused_updates:
            parts.trackers.log_event("updates_refused", step=step + 1, reason="the gradient is not finite")
        if new_version:
            with self._waiting("write_s"):
                await self._write_version(after)
            self._loaded.clear()
            self._to_load.set()
        values = self._step_values(version, groups, stats, late_tokens)
        if parts.teacher is not None:
            values |= parts.teacher.values
        if parts.swarm is not None:
            values |= parts.swarm.stepped(external)
        parts.trackers.log(step + 1, values)
        if self._config.train.teacher is None and self.learning.stepped([*groups, *external]):
            self._warn("cannot_learn", step, self.learning.warning)
        self._warn("reward_collapsed", step, self._collapse.stepped(self.totals.rewards[-1]))

    def _warn(self, name: str, step: int, reason: str) -> None:
        """Records a warning as an event of the step, if there is one."""
        if reason:
            self._parts.trackers.log_event(name, step=step + 1, reason=reason)

    @contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        """Counts the seconds of a block under a name of the metrics."""
        began_s = time.monotonic()
        yield
        self._waited_s[name] += time.monotonic() - began_s

    async def _external_groups(self, version: int) -> list[Group]:
        """Takes the chosen groups of peers; none without a swarm."""
        if self._parts.swarm is None:
            return []
        temperature = self._config.rollout.temperature
        return await self._parts.swarm.take(version, partial(self._parts.trainer.logprobs, temperature=temperature))

    async def _rows(self, groups: Sequence[Group], version: int) -> tuple[dict[str, tuple[Sample, ...]], Counter[str]]:
        """Builds each group's rows, by id, and counts each task's tokens that the late policy masked."""
        config = self._config
        groups = mixed(groups, lambda group: group.external, config.train.minibatches)  # no update is theirs alone
        samples = step_samples(groups, config.train, config.rollout.max_tokens)
        if self._parts.teacher is not None:
            samples = await self._parts.teacher.taught(samples)
        rows = dict(zip([g.id for g in groups], samples, strict=True))
        late_tokens: Counter[str] = Counter()
        for group in groups:
            if group.external:
                rows[group.id] = external_rows(rows[group.id], config.swarm.credit)
            if oldest := config.asynchrony.staleness.masked_below(version):
                rows[group.id], late = mask_tokens(rows[group.id], oldest)
                late_tokens[group.task.service] += late
        return rows, late_tokens

    async def _write_version(self, version: int, *, push: bool = True) -> None:
        """Writes the weights as `version` and records it."""
        unfinished = self._parts.store.begin(version)
        self._busy_s += await self._parts.trainer.write_version(unfinished / version_file(self._config), push=push)
        if self._config.engine.urls or self._config.cluster.listen:
            await self._write_canary(unfinished)
        written = await asyncio.to_thread(self._parts.store.seal, version)
        exact = await self._parts.buffer.record_version(version, written.checksum)
        if not exact:
            self._parts.trackers.log_event("replay_not_exact", version=version)
        self._newest, self.version = written, version

    async def _write_canary(self, directory: Path) -> None:
        """Writes the logprobs of the new weights on one prompt; engines of other projects are checked by them."""
        row = self._parts.single_turn.renderer.prompt_ids(self._parts.eval_tasks[0].messages)[:CANARY_TOKENS]
        (logprobs,) = await self._parts.trainer.logprobs([row])
        bound = PARITY_BOUND_NATS[self._config.model.dtype]
        await asyncio.to_thread(canary.write, canary.Canary(tuple(row), logprobs, bound), directory)

    async def load_recovered(self, version: int) -> None:
        """Has engines load `version` from the ended run's files.

        Without these files the trainer writes its weights; they differ only if steps without a Version followed.
        """
        if self._newest is None:
            kept = await asyncio.to_thread(self._parts.store.kept, version)
            if kept is not None and await self._parts.buffer.record_version(version, kept.checksum):
                self._newest = kept
            else:
                await self._write_version(version, push=False)
        assert self._newest is not None
        await self._parts.engine.update_weights(version, self._newest.path)

    async def _save(self, step: int) -> None:
        """Has the trainer save its state after `step`, which `_seal` makes a checkpoint."""
        began_s = time.monotonic()
        with self._waiting("save_s"):
            directory = await asyncio.to_thread(checkpoint.begin, self._parts.run_dir, step)
            self._busy_s += await self._parts.trainer.save(directory, later=self._config.checkpoint.asynchronous)
            self._saved = step
        self._checkpoint_due.saved(time.monotonic() - began_s)

    async def _seal(self, tasks: asyncio.TaskGroup) -> None:
        """Seals the saved files, if there are some, after the log, which must know every step of a checkpoint."""
        if self._saved is None:
            return
        parts, step, self._saved, began_s = self._parts, self._saved, None, time.monotonic()
        with self._waiting("save_s"):
            if self._config.checkpoint.asynchronous:
                await parts.trainer.finish_save()
            await parts.buffer.sync()
            await asyncio.to_thread(checkpoint.seal, parts.run_dir, step, keep=self._config.checkpoint.keep)
            await self._archive(step, tasks)
        self._checkpoint_due.sealed(time.monotonic() - began_s)

    async def _archive(self, step: int, tasks: asyncio.TaskGroup) -> None:
        """Moves steps that are too old for replay out of the log, `log.keep_steps` or more at a time."""
        keep = self._config.log.keep_steps
        saved = await asyncio.to_thread(checkpoint.checkpoints, self._parts.run_dir)
        through = min(step - keep, saved[0].step)
        if keep and through - self._archived >= keep and (self._archiving is None or self._archiving.done()):
            self._archived = through
            self._archiving = tasks.create_task(self._parts.buffer.archive(through), name="archiving the log")

    def _step_values(
        self, version: int, groups: Sequence[Group], stats: StepStats, late_tokens: Counter[str]
    ) -> dict[str, float]:
        """Metrics of one step. Rates and shares cover the time since the step before."""
        now = time.monotonic()
        elapsed_s = now - self._recorded_s
        finished = [rollout for group in groups for rollout in group.finished]
        staleness = [version - group.oldest_version for group in groups]
        reward = fmean(rollout.reward.value for rollout in finished)
        self.totals.samples += len(finished)
        self.totals.staleness_max = max(self.totals.staleness_max, *staleness)
        self.totals.rewards.append(reward)
        counted = lost_groups(self._parts.buffer)
        gate = self._parts.buffer.gate
        engine_shares = self._engine_shares or [self._engine_info.busy_share if self._engine_info else 0.0]
        values = {
            "version": version,
            "reward": reward,
            **task_values(groups, elapsed_s),
            "staleness_mean": fmean(staleness),
            "staleness_max": max(staleness),
            "tokens_per_s": sum(rollout.sampled_tokens for rollout in finished) / elapsed_s,
            "samples_per_s": len(finished) / elapsed_s,
            "step_s": elapsed_s,
            "engine_busy": fmean(engine_shares),
            "trainer_busy": min(1.0, self._busy_s / elapsed_s),
            **{f"staleness/{k}": staleness.count(k) for k in range(self.totals.staleness_max + 1)},
            **stats_values(stats),
            "informative_share": fmean(is_informative(group, self._returns) for group in groups),
            "length_mean": fmean(rollout.sampled_tokens for rollout in finished),
            "late_tokens": late_tokens.total(),
            **{f"late_tokens/{name}": count for name, count in late_tokens.items()},
            "cut_share": fmean(was_cut(rollout) for rollout in finished),
            "waiting": self._parts.buffer.waiting,
            **{name: self._waited_s[name] for name in ("groups_wait_s", "train_s", "write_s", "save_s")},
            "load_s": self._load_s,
            "gate_closed": fmean(self._held_back or [gate.accepted + gate.running >= gate.budget]),
            **scorer_values(self._parts.single_turn.scorer),
            **{name: count - self._counted.get(name, 0) for name, count in counted.items()},  # lost since, by cause
        }
        self._counted = counted
        self._busy_s, self._recorded_s, self._engine_shares, self._held_back = 0.0, now, [], []
        self._waited_s.clear()
        return values
