"""The training loop: a policy, the log of its steps, and the schedule of pushes, checkpoints and evaluations.

    step         consumes groups; waits for the buffer, then for the trainer
    write        has the trainer write a Version, and records it in the log; waits for nothing else
    load         has engines load the newest Version; waits for them; unblocks admission
    evaluation   begins when engines serve the newest Version; then it waits for them only. It holds up no load, so its
                 record names the Versions that answered

Generation continues during each of them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shoal.config import Config
from shoal.experience.held_out import HeldOutAnswer, write_answers
from shoal.interfaces import Runner
from shoal.observe.metrics import Trackers
from shoal.observe.token_files import TokensFiles
from shoal.rollout.evaluation import evaluation
from shoal.run.checkpoints import Checkpoints
from shoal.run.engine_watch import POLL_S, EngineMismatch, EngineWatch
from shoal.run.learning import Collapse, Learning
from shoal.run.policy import Policy, StepRows
from shoal.run.result import RunTotals
from shoal.run.step_metrics import StepMetrics
from shoal.swarm.node import Node
from shoal.trainer.advantage import returns_of
from shoal.trainer.messages import StepStats
from shoal.types import Group, Task


@dataclass(slots=True)
class EvaluationCost:
    """Comparison of the last evaluation's seconds with those of training between two; it warns once."""

    questions: int
    clock: Callable[[], float] = time.monotonic
    evaluation_s: float = 0.0
    warned: bool = False
    _since_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._since_s = self.clock()

    def begin(self) -> None:
        """Notes that training begins."""
        self._since_s = self.clock()

    def trained(self, steps: int) -> str:
        """Notes that so many steps were trained since the last call. Returns the warning where it is due."""
        trained_s, self._since_s = self.clock() - self._since_s, self.clock()
        if self.warned or self.evaluation_s <= trained_s:
            return ""
        self.warned = True
        few = max(1, int(self.questions * trained_s / self.evaluation_s / 4))
        return (
            f"an evaluation takes {self.evaluation_s:.0f} s, more than the {trained_s:.0f} s of the {steps} steps "
            f"between two; set eval.questions to {few}, or eval.every_steps above {4 * steps}"
        )


@dataclass(slots=True)
class HeldOutEvaluations:
    """Evaluations of one run; at most one runs at a time."""

    config: Config
    run_dir: Path
    tasks: Sequence[Task]
    runner: Runner
    trackers: Trackers
    values: list[Mapping[str, float]]
    """Values of each evaluation, those of earlier processes included."""
    loaded: Callable[[], Awaitable[None]]
    """Waits until engines serve the newest Version."""
    clock: Callable[[], float] = time.monotonic
    cost: EvaluationCost = field(init=False)
    _running: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.cost = EvaluationCost(self.config.held_out_questions, self.clock)

    def start(self, steps_done: int, tasks: asyncio.TaskGroup) -> None:
        """Starts an evaluation in `tasks`, unless the one before still runs."""
        if self._running is None or self._running.done():
            self._running = tasks.create_task(self.run(steps_done), name="evaluation")

    async def ended(self) -> None:
        """Waits for the evaluation that is under way."""
        if self._running is not None:
            await self._running

    async def run(self, steps_done: int) -> None:
        """Answers the questions, sampled as in training and greedy, and records answers and values."""
        await self.loaded()
        began_s, first = self.clock(), not self.values
        evaluated = await evaluation(self.tasks, self.runner, self.config.eval.samples, first=first)
        self.cost.evaluation_s = self.clock() - began_s
        answers = [
            HeldOutAnswer.of(steps_done, task, purpose, position, rollout)
            for task, purpose, rollouts in evaluated.rollouts
            for position, rollout in enumerate(rollouts)
        ]
        await asyncio.to_thread(write_answers, self.run_dir, steps_done, answers)
        values = {**evaluated.values, **evaluated.versions}
        self.values.append(values)
        self.trackers.log_eval(steps_done, values)
        self.trackers.log_answers(steps_done, evaluated.answers)
        if evaluated.failure:
            self.trackers.log_event("rollout_failed", reason=evaluated.failure)


@dataclass(frozen=True, slots=True)
class RunParts:
    """Parts of a run that its policy does not hold."""

    run_dir: Path
    eval_tasks: Sequence[Task]
    trackers: Trackers
    node: Node | None = None
    """Node of a swarm."""
    clock: Callable[[], float] = time.monotonic
    poll_s: float = POLL_S
    """Seconds between looks at the engines."""


class TrainLoop:
    """Owner of the steps. Invariant: the log records a step before engines load its weights."""

    def __init__(self, policy: Policy, parts: RunParts, *, first_step: int, totals: RunTotals | None = None) -> None:
        """`totals` are those of the run's earlier processes."""
        config, self.totals = policy.config, totals or RunTotals()
        returns = returns_of(config.train, config.rollout.max_tokens)
        self.policy, self.first_step = policy, first_step
        self._parts, self._config, self._buffer = parts, config, policy.buffer
        self.learning = Learning(returns, config.train.compares_within_groups)
        self._collapse = Collapse(config.train.lr)
        self.watch = EngineWatch(policy.engine, policy.buffer, config.engine, parts.poll_s)
        self._mismatch = EngineMismatch(policy.engine)
        self.checkpoints = Checkpoints(config, parts.run_dir, policy.trainer, policy.buffer, parts.clock)
        self.evaluations = HeldOutEvaluations(
            config, parts.run_dir, parts.eval_tasks, policy.runner, parts.trackers, self.totals.evals,
            policy.versions.loaded, parts.clock,
        )  # fmt: skip
        self._metrics = StepMetrics(policy.buffer, policy.scorer, self.watch, returns, self.totals, parts.clock)
        self._tokens_files = TokensFiles(parts.run_dir)
        self._end: Callable[[], None] | None = None
        self._taking: asyncio.Task[tuple[list[Group], list[Group]]] | None = None
        policy.versions.on_inexact = lambda version: parts.trackers.log_event("replay_not_exact", version=version)

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Trains the remaining steps, then waits until engines have loaded the last Version."""
        train, every = self._config.train, self._config.eval.every_steps
        self._metrics.begin()  # earlier numbers belong to no step
        self.evaluations.cost.begin()
        for step in range(self.first_step, train.steps):
            last = step == train.steps - 1
            groups, external = await self._groups(step, tasks)
            await self._step(step, groups, external, new_version=last or (step + 1) % train.push_every == 0)
            await self._seal(tasks)  # of the step before
            if last or self.checkpoints.due.after(step):
                with self._metrics.waiting("save_s"):
                    self._metrics.busy_s += await self.checkpoints.save(step)
                if last or not self._config.checkpoint.asynchronous:
                    await self._seal(tasks)
            if last or (every and (step + 1) % every == 0):
                self._warn("evaluation_costs", step, self.evaluations.cost.trained(every or train.steps))
                if not last:
                    self.evaluations.start(step + 1, tasks)
        await self.evaluations.ended()
        await self.checkpoints.archived()
        await self.policy.versions.loaded()

    @property
    def progress(self) -> tuple[int, ...]:
        """Counters, of which at least one changes with any progress of the run."""
        return (*self.watch.progress, self.policy.version, len(self.totals.rewards), len(self.totals.evals))

    def stop(self, end: Callable[[], None]) -> None:
        """Has the loop save, after the step under way or at once if it waits for groups, and then call `end`."""
        self._end = end
        if self._taking is not None:
            self._taking.cancel()

    async def _groups(self, step: int, tasks: asyncio.TaskGroup) -> tuple[list[Group], list[Group]]:
        """Own groups and those of peers for a step; never returns once the loop is to stop."""

        async def taken() -> tuple[list[Group], list[Group]]:
            async with asyncio.TaskGroup() as both:
                taking = both.create_task(self.policy.take())
                # While the step waits for own groups, the trainer is free to encode those of peers, and to compare.
                both.create_task(self._compare_engines())
                encoding = both.create_task(self._external_groups(self.policy.version))
            return taking.result(), encoding.result()

        if self._end is None:
            self._taking = asyncio.create_task(taken(), name="groups of a step")
            try:
                with self._metrics.waiting("groups_wait_s"):
                    return await self._taking
            except asyncio.CancelledError:
                if self._end is None:
                    raise
            finally:
                self._taking = None
        assert self._end is not None
        await self._seal(tasks)
        if step > self.first_step and self.checkpoints.newest < step - 1:
            await self.checkpoints.save(step - 1)
            await self._seal(tasks)
        self._end()
        await asyncio.Event().wait()
        raise AssertionError

    async def _step(self, step: int, groups: Sequence[Group], external: Sequence[Group], *, new_version: bool) -> None:
        policy, version, metrics = self.policy, self.policy.version, self._metrics
        rows = await policy.rows([*groups, *external], version)
        with metrics.waiting("train_s"):
            stats = await self._record_and_train(step, groups, external, rows, new_version=new_version)
        await asyncio.to_thread(self._tokens_files.prune)
        metrics.busy_s += stats.seconds
        if stats.refused_updates:
            self._warn("updates_refused", step, "the gradient is not finite")
        if new_version:
            with metrics.waiting("write_s"):
                metrics.busy_s += await policy.versions.write(version + 1)
            policy.versions.load_soon()
        values = metrics.stepped(version, groups, stats, rows.late_tokens, policy.versions.load_s)
        if policy.teacher is not None:
            values |= policy.teacher.values
        if self._parts.node is not None:
            values |= self._parts.node.stepped(external)
        self._parts.trackers.log(step + 1, values)
        if self._config.train.teacher is None and self.learning.stepped([*groups, *external]):
            self._warn("cannot_learn", step, self.learning.warning)
        self._warn("reward_collapsed", step, self._collapse.stepped(self.totals.rewards[-1]))

    async def _record_and_train(
        self, step: int, groups: Sequence[Group], external: Sequence[Group], rows: StepRows, *, new_version: bool
    ) -> StepStats:
        """Commits the step to the log while the trainer takes it, then the fingerprint of its weights."""
        version, ids = self.policy.version, [group.id for group in groups]
        after = version + 1 if new_version else version
        recording = self._buffer.consumed(
            step, version, ids, version_after=after, external=external, rows=rows.of_group
        )
        since_push = step % self._config.train.push_every
        file = self._tokens_files.wanted(step + 1, list(rows.of_group))
        async with asyncio.TaskGroup() as both:
            both.create_task(recording)
            trained = both.create_task(self.policy.train(rows, version, since_push=since_push, tokens_file=file))
        stats = trained.result()
        await self._buffer.record_weights(step, stats.weights)
        return stats

    def _warn(self, name: str, step: int, reason: str) -> None:
        """Records a warning as an event of the step, if there is one."""
        if reason:
            self._parts.trackers.log_event(name, step=step + 1, reason=reason)

    async def _external_groups(self, version: int) -> list[Group]:
        """Takes the chosen groups of peers; none without a swarm."""
        if self._parts.node is None:
            return []
        temperature = self._config.rollout.temperature
        return await self._parts.node.take(version, partial(self.policy.trainer.logprobs, temperature=temperature))

    async def _compare_engines(self) -> None:
        """Compares what engines of other hosts have sampled with the trainer's logprobs."""
        config = self._config
        if config.engine.urls or config.cluster.listen:
            logprobs = partial(self.policy.trainer.logprobs, temperature=config.rollout.temperature)
            await self._mismatch.compare(logprobs, config.rollout.temperature)

    async def _seal(self, tasks: asyncio.TaskGroup) -> None:
        with self._metrics.waiting("save_s"):
            await self.checkpoints.seal(tasks)
