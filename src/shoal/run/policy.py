"""A policy is a model with its engine and trainer: the body of every training loop. See docs/guides/library.md.

`shoal train` and a loop of the user's own run the same lines. TrainLoop adds the log of its steps and the schedule.
"""

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.config import Config
from shoal.engine.pool.engine_pool import EnginePool
from shoal.experience.buffer import Buffer
from shoal.experience.schema import StepRecord
from shoal.interfaces import Runner, Scorer
from shoal.rollout.evaluation import evaluation, held_out_tasks
from shoal.run.dynamic_sampling import informative_groups
from shoal.run.engines import OwnEngines
from shoal.run.prepare import Prepared
from shoal.run.teacher import TextTeacher
from shoal.run.versions import ServedVersions
from shoal.swarm.strategy.choice import external_rows
from shoal.trainer.advantage import mask_tokens, step_samples
from shoal.trainer.messages import StepStats, TokensFile
from shoal.trainer.packing import mixed
from shoal.trainer.worker import StepTrainer
from shoal.types import Group, Sample
from shoal.weights.store import ADAPTER_FILE, FILE, WeightStore


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """Running parts of a policy."""

    prepared: Prepared
    engine: EnginePool
    trainer: StepTrainer
    runner: Runner
    scorer: Scorer
    buffer: Buffer
    store: WeightStore
    own_engines: OwnEngines
    teacher: TextTeacher | None
    draw: Callable[[], Coroutine[None, None, None]]
    """Fills the buffer until cancelled; a run starts it, elsewhere `Policy.groups` does."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """Trainer's rows of one step."""

    of_group: dict[str, tuple[Sample, ...]]
    """Rows by group id, in training order."""
    late_tokens: Counter[str] = field(default_factory=Counter)
    """Masked late tokens by task."""


class Steps:
    """A trainer that takes steps on groups. Invariant: rows depend on the configuration, the groups and the Version."""

    def __init__(self, config: Config, trainer: StepTrainer, teacher: TextTeacher | None) -> None:
        self.config, self.trainer, self.teacher = config, trainer, teacher

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
        self, record: StepRecord, groups: Sequence[Group], tokens_file: TokensFile | None = None
    ) -> StepStats:
        """Takes a recorded step again; the caller then writes its Version, if it had one."""
        rows, since_push = await self.rows(groups, record.version), record.step % self.config.train.push_every
        return await self.train(rows, record.version, since_push=since_push, tokens_file=tokens_file)

    async def write_model(self, model_dir: Path, target: Path) -> Path:
        """Writes the trained model with the other files of `model_dir`, and an adapter below it; returns `target`."""
        skip = shutil.ignore_patterns("*.safetensors*")
        await asyncio.to_thread(shutil.copytree, model_dir, target, dirs_exist_ok=True, ignore=skip)
        await self.trainer.write_version(target / FILE, push=False)
        if self.config.train.lora.rank:  # in the folder of the merged model, transformers would add it once more
            (target / "adapter").mkdir(exist_ok=True)
            await self.trainer.write_version(target / "adapter" / ADAPTER_FILE, push=False)
        return target


class Policy(Steps):
    """Model that answers, trains and serves its new weights as the caller decides.

    Invariant: without a late policy other than "drop", no group has a token older than `version - max_staleness`.
    """

    def __init__(self, parts: PolicyParts) -> None:
        super().__init__(parts.prepared.config, parts.trainer, parts.teacher)
        self.prepared, self.engine, self.buffer = parts.prepared, parts.engine, parts.buffer
        self.runner, self.scorer = parts.runner, parts.scorer
        self.own_engines, self.draw = parts.own_engines, parts.draw
        version = parts.buffer.recovered.version
        self.versions = ServedVersions(parts.prepared, parts.engine, parts.trainer, parts.buffer, parts.store, version)
        self._since_push = 0
        self._drawing: asyncio.Task[None] | None = None

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
        return await self.write_model(self.prepared.model_dir, await asyncio.to_thread(Path(directory).absolute))

    async def take(self) -> list[Group]:
        """Takes the groups of one step from the buffer."""
        take = informative_groups if self.config.train.dynamic_sampling else Buffer.take
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
