"""A policy is a model with its engine and trainer: the body of every training loop. See docs/guides/library.md.

`shoal train` and a loop of the user's own run the same lines. TrainLoop adds the log of its steps and the schedule.
The trainer writes each Version of the weights, the log records it, then engines load it.
"""

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path

from shoal.config import Config
from shoal.engine.pool import canary
from shoal.engine.pool.engine_pool import EnginePool
from shoal.experience.buffer import Buffer
from shoal.experience.schema import StepRecord
from shoal.files import ADAPTER_FILE, MODEL_FILE
from shoal.interfaces import Engine, Runner, Scorer
from shoal.rollout.evaluation import evaluation, held_out_tasks
from shoal.rollout.reward_hooks import BEFORE
from shoal.run.engines import RunEngines
from shoal.run.learning import UNINFORMATIVE
from shoal.run.prepare import Prepared
from shoal.run.teacher import TextTeacher
from shoal.swarm.strategy.choice import external_rows
from shoal.trainer.advantage import is_informative, mask_tokens, step_samples, turn_returns
from shoal.trainer.messages import StepStats, TokensFile
from shoal.trainer.packing import mixed
from shoal.trainer.worker import StepTrainer
from shoal.types import Group, Rollout, Sample, Split
from shoal.weights.store import WeightStore, WrittenVersion

REDRAWS_PER_GROUP = 3
"""Drops per wanted group at most: a step on tasks that are all too easy or too hard would never end."""


def outcome_returns(rollout: Rollout) -> list[float]:
    """Returns of a rollout by its outcome, before any deduction for length.

    >>> from shoal.types import Reward
    >>> outcome_returns(Rollout("r", (), (), Reward(0.75, parts=((BEFORE, 1.0),))))
    [1.0]
    """
    before = next((value for name, value in rollout.reward.parts if name == BEFORE), rollout.reward.value)
    return turn_returns(replace(rollout, reward=replace(rollout.reward, value=before)))


async def informative_groups(buffer: Buffer, n: int, version: int) -> list[Group]:
    """Takes `n` groups for `version` and drops uninformative groups, whose budget lets others start.

    Rollouts are compared by their outcomes: an all-wrong group teaches nothing, though its answers differ in length.

    After `REDRAWS_PER_GROUP * n` drops every group is taken. A dropped group stays in the log with its reason and is
    never offered again. Source: dynamic sampling of DAPO (arXiv 2503.14476 §3.2).
    """
    kept: list[Group] = []
    room = REDRAWS_PER_GROUP * n
    while len(kept) < n:
        taken = await buffer.take(n - len(kept), version)
        idle = {group.id for group in [group for group in taken if not is_informative(group, outcome_returns)][:room]}
        if idle:
            await buffer.drop(sorted(idle), UNINFORMATIVE)
        room -= len(idle)
        kept += [group for group in taken if group.id not in idle]
    return kept


PARITY_BOUND_NATS = {"float32": 1e-3, "bfloat16": 0.1}  # of mean |difference| between engine and trainer
CANARY_TOKENS = 64


@dataclass(slots=True, eq=False)
class ServedVersions:
    """Writer and loader of Versions. Invariant: the log has a Version before an engine loads it."""

    prepared: Prepared
    engine: Engine
    trainer: StepTrainer
    buffer: Buffer
    store: WeightStore
    number: int = 0
    """The newest Version, whose weights are being trained."""
    load_s: float = 0.0
    """Seconds of the last load."""
    on_inexact: Callable[[int], None] = lambda version: None
    """Gets a Version that the log has with another checksum: a replay was not exact."""
    _newest: WrittenVersion | None = None
    _unsealed: int | None = None
    _sealing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _to_seal: asyncio.Event = field(default_factory=asyncio.Event)
    _to_load: asyncio.Event = field(default_factory=asyncio.Event)
    _served: int = field(init=False)
    """The newest Version that engines have loaded."""
    _load_ended: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self._served = self.number

    async def write(self, number: int, *, push: bool = True) -> float:
        """Writes the trained weights as Version `number`; returns the trainer's seconds.

        Sealing, which hashes the files, is left to `seal`, so that the next step need not wait for it. `push` counts
        the write as a push. Raises `TrainerError`, `ChildDied` and `RunDirError`.
        """
        await self.seal()
        unfinished = self.store.begin(number)
        config, file = self.prepared.config, unfinished / self.prepared.version_file
        busy_s = await self.trainer.write_version(file, push=push, later=config.checkpoint.asynchronous)
        if config.engine.urls or config.cluster.listen:
            await self._write_canary(unfinished)
        self._unsealed = self.number = number
        self._to_seal.set()
        return busy_s

    async def seal(self) -> None:
        """Seals the Version that was written last and records it, unless that is done. Raises `RunDirError`."""
        async with self._sealing:
            if (number := self._unsealed) is None:
                return
            if self.prepared.config.checkpoint.asynchronous:
                await self.trainer.finish_save(self.store.unfinished(number))
            written = await asyncio.to_thread(self.store.seal, number)
            if not await self.buffer.record_version(number, written.checksum):
                self.on_inexact(number)
            self._newest, self._unsealed = written, None

    async def load(self) -> None:
        """Has engines load the newest Version, then removes older ones."""
        await self.seal()
        written, loop = self._newest, asyncio.get_running_loop()
        assert written is not None, "no Version was written yet"
        began_s = loop.time()
        await self.engine.update_weights(written.version, written.path)
        self.load_s = loop.time() - began_s
        self.buffer.on_loaded(written.version)
        await asyncio.to_thread(self.store.remove_before, written.version)
        async with self._load_ended:
            self._served = written.version
            self._load_ended.notify_all()

    def load_soon(self) -> None:
        """Has `keep_loaded` load the newest Version; returns at once."""
        self._to_load.set()

    async def keep_loaded(self) -> None:
        """Loads the newest Version after each `load_soon`, until cancelled; seals each while engines load another."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_sealed(), name="sealing versions")
            while True:
                await self._to_load.wait()
                self._to_load.clear()
                await self.load()

    async def _keep_sealed(self) -> None:
        """Seals each Version as soon as it is written."""
        while True:
            await self._to_seal.wait()
            self._to_seal.clear()
            await self.seal()

    async def loaded(self) -> None:
        """Waits until engines serve the Version that is the newest now, or a later one."""
        wanted = self.number
        async with self._load_ended:
            await self._load_ended.wait_for(lambda: self._served >= wanted)

    async def recover(self, number: int) -> None:
        """Has engines load Version `number` of an ended run from its files.

        Without these files the trainer writes its weights; they differ only if steps without a Version followed.
        """
        await self.seal()
        if self._newest is None:
            kept = await asyncio.to_thread(self.store.kept, number)
            if kept is not None and await self.buffer.record_version(number, kept.checksum):
                self._newest, self.number = kept, number
            else:
                await self.write(number, push=False)
                await self.seal()
        assert self._newest is not None
        await self.engine.update_weights(number, self._newest.path)

    async def _write_canary(self, directory: Path) -> None:
        """Writes the logprobs of the new weights on one prompt; engines of other projects are checked by them."""
        task = await asyncio.to_thread(self.prepared.service.draw, Split.EVAL, 0)
        row = self.prepared.renderer.prompt_ids(task.messages)[:CANARY_TOKENS]
        (logprobs,) = await self.trainer.logprobs([row])
        bound = PARITY_BOUND_NATS[self.prepared.config.model.dtype]
        await asyncio.to_thread(canary.write, canary.Canary(tuple(row), logprobs, bound), directory)


@dataclass(frozen=True, slots=True)
class StepRows:
    """Trainer's rows of one step."""

    of_group: dict[str, tuple[Sample, ...]]
    """Rows by group id, in training order."""
    late_tokens: Counter[str] = field(default_factory=Counter)
    """Masked late tokens by task."""


@dataclass(slots=True, eq=False)
class Steps:
    """A trainer that takes steps on groups. Invariant: rows depend on the configuration, the groups and the Version."""

    config: Config
    trainer: StepTrainer
    teacher: TextTeacher | None

    async def rows(self, groups: Sequence[Group], version: int) -> StepRows:
        """Builds the rows of groups for training under `version`."""
        config = self.config
        groups = mixed(groups, lambda group: group.external, config.train.minibatches)  # no update is theirs alone
        samples = step_samples(groups, config.train, config.rollout.max_tokens)
        if self.teacher is not None:
            samples = await self.teacher.taught(samples)
        rows = StepRows({group.id: of_group for group, of_group in zip(groups, samples, strict=True)})
        oldest = config.asynchrony.staleness.masked_below(version)
        for group in groups:
            if group.external:
                rows.of_group[group.id] = external_rows(rows.of_group[group.id], config.swarm.credit)
            if oldest:
                rows.of_group[group.id], late = mask_tokens(rows.of_group[group.id], oldest)
                rows.late_tokens[group.task.service] += late
        return rows

    async def train(
        self, rows: StepRows, version: int, *, since_push: int, tokens_file: TokensFile | None = None
    ) -> StepStats:
        """Has the trainer take one step, `since_push` steps after `version` was written."""
        return await self.trainer.step(list(rows.of_group.values()), version, since_push, tokens_file=tokens_file)

    async def repeat(
        self,
        record: StepRecord,
        groups: Sequence[Group],
        tokens_file: TokensFile | None = None,
        change: Callable[[StepRows], StepRows] = lambda rows: rows,
    ) -> StepStats:
        """Takes a recorded step again, with changed rows; the caller then writes its Version, if it had one."""
        rows, since_push = change(await self.rows(groups, record.version)), record.step % self.config.train.push_every
        return await self.train(rows, record.version, since_push=since_push, tokens_file=tokens_file)

    async def write_model(self, model_dir: Path, target: Path, adapter: Path) -> None:
        """Writes the trained model as a Hugging Face directory, with the other files of `model_dir`.

        An adapter's own folder is `adapter`: in that of the merged model, transformers would add it once more.
        """
        skip = shutil.ignore_patterns("*.safetensors*")
        await asyncio.to_thread(shutil.copytree, model_dir, target, dirs_exist_ok=True, ignore=skip)
        await self.trainer.write_version(target / MODEL_FILE, push=False)
        if self.config.train.lora.rank:
            await asyncio.to_thread(adapter.mkdir, exist_ok=True)
            await self.trainer.write_version(adapter / ADAPTER_FILE, push=False)


@dataclass(slots=True, eq=False)
class Policy(Steps):
    """Model that answers, trains and serves its new weights as the caller decides.

    Invariant: without a late policy other than "drop", no group has a token older than `version - max_staleness`.
    """

    prepared: Prepared
    engine: EnginePool
    runner: Runner
    scorer: Scorer
    buffer: Buffer
    store: InitVar[WeightStore]
    engines: RunEngines
    draw: Callable[[], Coroutine[None, None, None]]
    """Fills the buffer until cancelled; a run starts it, elsewhere `groups` does."""
    versions: ServedVersions = field(init=False)
    _since_push: int = 0
    _drawing: asyncio.Task[None] | None = None

    def __post_init__(self, store: WeightStore) -> None:
        version = self.buffer.recovered.version
        self.versions = ServedVersions(self.prepared, self.engine, self.trainer, self.buffer, store, version)

    @property
    def version(self) -> int:
        """The newest Version: the number of pushes so far."""
        return self.versions.number

    async def groups(self) -> list[Group]:
        """Returns the next `train.groups_per_step` groups, oldest first; further groups are sampled ahead within the
        staleness bound.

        Groups with less than half of their answers, or that became too old, are sampled again. Raises a `ShoalError`.
        """
        if self._drawing is None:
            self._drawing = asyncio.create_task(self._keep_drawing(), name="drawing groups")
        groups = await self.take()
        await self.buffer.hand_out([group.id for group in groups], self.version)
        return groups

    async def step(self, groups: Sequence[Group]) -> StepStats:
        """Trains one step on the groups. The engine keeps its weights."""
        rows = await self.rows(groups, self.version)
        stats = await self.train(rows, self.version, since_push=self._since_push)
        self._since_push += 1
        return stats

    async def push(self) -> int:
        """Has the engine load the trained weights; returns the new Version. Running answers continue under it."""
        await self.versions.write(self.version + 1)
        await self.versions.load()
        self._since_push = 0
        return self.version

    async def accuracy(self, questions: int = 64) -> tuple[float, float]:
        """Share of held-out questions answered right: sampled as in training, and greedy."""
        tasks, _ = held_out_tasks(self.prepared.service, questions)
        measured = await evaluation(tasks, self.runner)
        return measured.values["sampled"], measured.values["greedy"]

    async def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes the trained model as a Hugging Face directory, with merged adapters, which `adapter/` has too."""
        target = await asyncio.to_thread(Path(directory).absolute)
        await self.write_model(self.prepared.model_dir, target, target / "adapter")
        return target

    async def take(self) -> list[Group]:
        """Takes the groups of one step from the buffer."""
        take = informative_groups if self.config.train.dynamic_sampling is True else Buffer.take
        return await take(self.buffer, self.config.train.groups_per_step, self.version)

    async def aclose(self) -> None:
        """Stops sampling."""
        if self._drawing is not None:
            self._drawing.cancel()
            await asyncio.wait([self._drawing])

    async def _keep_drawing(self) -> None:
        """Keeps the buffer filled; an error that ends it is raised by `groups`."""
        try:
            await self.draw()
        except ExceptionGroup as errors:
            error: Exception = errors
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            self.buffer.fail_waiting(error)
