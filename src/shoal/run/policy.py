"""A policy joins a model, its engine and its trainer for a user's own training loop. See docs/guides/library.md."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from shoal.config import Config
from shoal.experience.gate import AdmissionGate
from shoal.interfaces import Engine, Purpose, Runner
from shoal.rollout.evaluation import evaluation, held_out_tasks
from shoal.run.assemble import playing, serving
from shoal.run.devices import Threads
from shoal.run.library import TaskSource, config_of
from shoal.run.plan import prepare
from shoal.run.prepared import Prepared, version_file
from shoal.run.teacher import TextTeacher, text_teacher
from shoal.trainer.advantage import step_samples
from shoal.trainer.messages import StepStats
from shoal.trainer.worker import TrainerProcess, local_ranks
from shoal.types import Group, Split
from shoal.weights.store import ADAPTER_FILE, FILE, WeightStore


class Policy:
    """Model that answers, trains and serves its new weights as the caller decides.

    Invariant: no group of `groups` has a token older than `version - max_staleness`.
    """

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        engine: Engine,
        trainer: TrainerProcess,
        runner: Runner,
        folder: Path,
        teacher: TextTeacher | None = None,
    ) -> None:
        self.config, self.engine, self.trainer, self._teacher = config, engine, trainer, teacher
        self._prepared, self._runner = prepared, runner
        self._store = WeightStore(folder / "weights")
        self._gate = AdmissionGate(
            config.asynchrony.staleness,
            groups_per_step=config.train.groups_per_step,
            push_every=1,
            max_running=max(config.engine.max_running // config.rollout.group_size, 1),
        )
        self._running: list[asyncio.Task[Group]] = []
        self._started = 0

    @property
    def version(self) -> int:
        """Number of Versions that the engine loaded."""
        return self._gate.version

    async def groups(self) -> list[Group]:
        """Returns the next `train.groups_per_step` groups, and samples further groups ahead within the staleness bound.

        Groups with less than half of their answers, or that became too old, are sampled again.
        """
        ready: list[Group] = []
        while len(ready) < self.config.train.groups_per_step:
            self._start_what_may()
            group = await self._running[0]
            self._running.pop(0)
            usable = 2 * len(group.finished) > len(group.rollouts)
            if usable and group.oldest_version >= self.config.asynchrony.staleness.oldest(self.version):
                self._gate.accept()
                ready.append(group)
            else:
                self._gate.fail()
        self._start_what_may()
        return ready

    async def step(self, groups: Sequence[Group]) -> StepStats:
        """Trains one step on the groups. The engine keeps its weights."""
        rows = step_samples(groups, self.config.train, self.config.rollout.max_tokens)
        if self._teacher is not None:
            rows = await self._teacher.taught(rows)
        return await self.trainer.step(rows, self.version)

    async def push(self) -> int:
        """Has the engine load the trained weights; returns the new Version. Running answers continue under it."""
        version = self.version + 1
        await self.trainer.write_version(self._store.begin(version) / version_file(self.config))
        written = await asyncio.to_thread(self._store.seal, version)
        await self.engine.update_weights(version, written.path)
        await asyncio.to_thread(self._store.remove_before, version)
        self._gate.on_loaded(version)
        return version

    async def accuracy(self, questions: int = 64) -> tuple[float, float]:
        """Share of held-out questions answered right: sampled as in training, and greedy."""
        tasks, _ = held_out_tasks(self._prepared.service, questions)
        measured = await evaluation(tasks, self._runner)
        return measured.values["sampled"], measured.values["greedy"]

    async def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes the trained model as a Hugging Face directory, with merged adapters, which `adapter/` has too."""
        target = await asyncio.to_thread(lambda: Path(directory).absolute())
        skip = shutil.ignore_patterns("*.safetensors*")
        await asyncio.to_thread(shutil.copytree, self._prepared.model_dir, target, dirs_exist_ok=True, ignore=skip)
        await self.trainer.write_version(target / FILE, push=False)
        if self.config.train.lora.rank:  # beside the merged model, transformers would add it once more
            (target / "adapter").mkdir(exist_ok=True)
            await self.trainer.write_version(target / "adapter" / ADAPTER_FILE, push=False)
        return target

    def close(self) -> None:
        """Cancels the groups being sampled."""
        for task in self._running:
            task.cancel()

    def _start_what_may(self) -> None:
        while self._gate.capacity:
            self._running.append(asyncio.create_task(self._sample_group(self._gate.admit(), self._started)))
            self._started += 1

    async def _sample_group(self, version: int, index: int) -> Group:
        task = await asyncio.to_thread(self._prepared.service.draw, Split.TRAIN, index)
        rollouts = await self._runner.rollouts(task, self.config.rollout.group_size, Purpose.TRAIN)
        return Group(f"{task.service}-{index}", task, rollouts, version)


@asynccontextmanager
async def open_policy(
    model: str | os.PathLike[str] = "demo",
    tasks: Sequence[TaskSource] | TaskSource | None = None,
    reward: object = None,
    **settings: object,
) -> AsyncIterator[Policy]:
    """Starts an engine and a trainer with a model; arguments are those of `train`. Raises a `ShoalError`.

    >>> import asyncio, shoal
    >>> async def loop() -> None:
    ...     async with shoal.open_policy("demo", max_tokens=12) as policy:
    ...         for _ in range(10):
    ...             await policy.step(await policy.groups())
    ...             await policy.push()
    >>> asyncio.run(loop())  # doctest: +SKIP
    """
    config, threads = config_of(model, tasks, reward, **settings), Threads()
    with tempfile.TemporaryDirectory(prefix="shoal-policy-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        prepared = await asyncio.to_thread(stack.enter_context, prepare(config))  # its checks may run coroutines
        log = folder / "logs" / "trainer.log"
        async with (
            local_ranks(log, threads.trainer, config.train.ranks, prepared.devices.ranks) as ranks,
            serving(config, prepared, folder, threads=threads) as (engine, single_turn),
            playing(config, prepared, engine, single_turn) as runner,
            text_teacher(config.train, prepared.renderer) as teacher,
        ):
            trainer = TrainerProcess(ranks)
            await trainer.start(prepared.model_dir, config, threads.trainer)
            policy = Policy(config, prepared, engine, trainer, runner, folder, teacher)
            try:
                yield policy
            finally:
                policy.close()
