"""The async bench compares `max_staleness` 0 and 4 on the same work, against the ideal of two cores that never wait.

The work is a number of training steps over rollouts of given lengths (lognormal with mean 32 tokens, at most 256), so
both sides sample and train exactly the same tokens. A question fixes the length of its answers, as hard questions have
long answers, and a group is one request, as in every run. `apart` gives each answer a length of its own, which takes
eight requests with the same prompt. The real engine samples the answers; they pass the real orchestrator, log and
trainer, and a checksum of their text is the reward.

    ideal        the slower of generating all tokens at full batch and training on them, each alone on one core
    synchronous  max_staleness = 0; each phase has both cores when that is faster
    asynchronous max_staleness = 4; one core each; the faster of the settings below
"""

import asyncio
import json
import random
import tempfile
import time
import zlib
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from statistics import fmean

import uvloop

from benchmarks import say
from benchmarks.model import write_bench_model
from shoal.config import Config, parse
from shoal.interfaces import Engine, Environment
from shoal.model.renderer_loading import load_renderer
from shoal.observe.metrics import Record
from shoal.rollout.single_turn import SingleTurn
from shoal.run.machine.devices import Threads
from shoal.run.parts import answering
from shoal.run.prepare import Prepared
from shoal.run.training import train
from shoal.trainer.advantage import step_samples
from shoal.trainer.worker import TrainerProcess, local_ranks
from shoal.types import (
    Completion,
    FinishReason,
    Group,
    Message,
    Reward,
    Role,
    Rollout,
    Sample,
    Sampling,
    Split,
    Task,
    Turn,
    seed_for,
)

Report = dict[str, object]
MEAN_TOKENS = 32
MOST_TOKENS = 256
PROMPT = "abcdefg"
GROUP_SIZE = 8
SETTINGS = (("recompute", 80), ("keep", 128))
"""Treatment of running answers at a new Version, and their largest number. Recomputing is exact and costs more for more
answers, so it prefers fewer."""
SIGMAS = (1.0, 0.0, 0.5, 1.5)
STEPS, FEWER_STEPS = 24, 16
"""Steps at the first sigma and at the others; filling and emptying the pipeline costs a step of each."""
GROUPS_PER_STEP = 16


@dataclass(frozen=True, slots=True)
class Work:
    """Amount of sampling and training."""

    sigma: float
    """Sigma of the lognormal lengths; 0 gives every answer the mean."""
    steps: int
    groups_per_step: int
    apart: bool = False
    """True if each answer has a length of its own, instead of its question's."""
    max_staleness: int = 4

    def lengths(self, index: int) -> list[int]:
        """Tokens of each rollout of the group at `index`."""
        generator = random.Random(seed_for("bench", str(self.sigma), index))
        mean = MEAN_TOKENS / exp(self.sigma**2 / 2)
        drawn = [min(MOST_TOKENS, max(1, round(mean * exp(generator.gauss(0, self.sigma))))) for _ in range(GROUP_SIZE)]
        return drawn if self.apart else drawn[:1] * GROUP_SIZE

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts that one step consumes."""
        return self.groups_per_step * GROUP_SIZE

    @property
    def groups(self) -> int:
        """Groups of the whole run."""
        return self.steps * self.groups_per_step


@dataclass(frozen=True, slots=True)
class LengthService(Environment):
    """Service of tasks with one prompt; `info` gives each rollout's length."""

    work: Work
    name: str = "lengths"

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`."""
        lengths = self.work.lengths(index)
        return Task(f"{split.value}-{index}", self.name, (Message(Role.USER, PROMPT),), info=json.dumps(lengths))


class FixedLengths(SingleTurn):
    """Runner that samples answers of the task's lengths; no token ends one early."""

    async def completions(
        self, task: Task, prompt_ids: tuple[int, ...], sampling: Sampling, n: int, priority: int = 0
    ) -> list[Completion]:
        """Sends one request for all answers, or one each where the lengths differ."""
        lengths = json.loads(task.info)[:n]

        def drawn(length: int, n: int, seed: int | None) -> Awaitable[list[Completion]]:
            fixed = replace(sampling, max_tokens=length, stop_token_ids=(), seed=seed)
            return self.engine.generate(prompt_ids, fixed, n=n, priority=priority)

        if len(set(lengths)) == 1:
            return await drawn(lengths[0], n, sampling.seed)
        each = await asyncio.gather(*(drawn(length, 1, i) for i, length in enumerate(lengths)))
        return [completion for (completion,) in each]


class CoinScorer:
    """Scorer that rewards half of all answers, so that every group is informative."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """Scores 1 or 0 by the parity of a checksum of the answer."""
        return [Reward(float(zlib.crc32(answer.encode()) & 1)) for answer in answers]


@dataclass(frozen=True, slots=True)
class Alone:
    """Seconds of each half of the work when nothing else runs."""

    generation_s: float
    training_s: float


@dataclass(frozen=True, slots=True)
class Side:
    """Figures of one whole run."""

    seconds: float
    engine_busy: float
    trainer_busy: float
    staleness_max: int


def measure(quick: bool) -> Report:
    """Measures `speedup` of asynchronous over synchronous, and the share of the ideal, for lengths of several
    spreads."""
    if quick:
        return uvloop.run(_compare(Work(SIGMAS[0], steps=4, groups_per_step=8)))
    works = {sigma: Work(sigma, STEPS if sigma == SIGMAS[0] else FEWER_STEPS, GROUPS_PER_STEP) for sigma in SIGMAS}
    by_sigma = {f"{sigma:g}": uvloop.run(_compare(work)) for sigma, work in works.items()}
    apart = uvloop.run(_compare(Work(SIGMAS[0], FEWER_STEPS, GROUPS_PER_STEP, apart=True)))
    return {**by_sigma[f"{SIGMAS[0]:g}"], "by_sigma": by_sigma, "apart": apart}


async def _compare(work: Work) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(Path(folder), work)
        length = f"sigma {work.sigma:g}{', lengths of their own' if work.apart else ''}"
        say(f"{length}: each half alone, then {1 + len(SETTINGS)} whole runs")
        one = await bench.alone(Threads(1, 1))
        both = await bench.alone(Threads(2, 2))
        best = Threads(
            engine=2 if both.generation_s < one.generation_s else 1,
            trainer=2 if both.training_s < one.training_s else 1,
        )
        synchronous = await bench.run(0, best, "recompute", work.rollouts_per_step)
        say(f"{length}: synchronous in {synchronous.seconds:.0f} s")
        tried = {
            f"{mode}, {running} at once": await bench.run(work.max_staleness, Threads(1, 1), mode, running)
            for mode, running in SETTINGS
        }
    say(f"{length}: asynchronous in " + ", ".join(f"{side.seconds:.0f} s ({name})" for name, side in tried.items()))
    setting, asynchronous = min(tried.items(), key=lambda pair: pair[1].seconds)
    ideal_s = max(one.generation_s, one.training_s)
    return {
        "speedup": synchronous.seconds / asynchronous.seconds,
        "ideal_speedup": synchronous.seconds / ideal_s,
        "share_of_ideal": ideal_s / asynchronous.seconds,
        "engine_busy": asynchronous.engine_busy,
        "trainer_busy": asynchronous.trainer_busy,
        "staleness_max": asynchronous.staleness_max,
        "synchronous_s": synchronous.seconds,
        "asynchronous_s": asynchronous.seconds,
        "asynchronous_setting": setting,
        "asynchronous_s_by_setting": {name: side.seconds for name, side in tried.items()},
        "generation_alone_s": one.generation_s,
        "training_alone_s": one.training_s,
        "synchronous_threads": f"engine {best.engine}, trainer {best.trainer}",
    }


class _Bench:
    """One amount of work, with a folder for its runs."""

    def __init__(self, folder: Path, work: Work) -> None:
        model_dir = folder / "model"
        write_bench_model(model_dir)
        self._folder = folder
        self._work = work
        self._runs = 0
        renderer, config = load_renderer(model_dir), self._config(work.max_staleness, "keep", work.rollouts_per_step)
        service, size = LengthService(work), len(PROMPT)
        self._prepared = Prepared(
            config, model_dir, renderer, service, 512, size, scorer=CoinScorer(), single_turn=FixedLengths
        )

    async def run(self, max_staleness: int, threads: Threads, on_update: str, max_running: int) -> Side:
        """Runs the whole work through orchestrator, log, engine and trainer."""
        steps: list[Record] = []

        def keep(record: Record) -> None:
            if record["kind"] == "step":
                steps.append(record)

        outcome = await train(
            replace(self._prepared, config=self._config(max_staleness, on_update, max_running), threads=threads),
            listeners=[keep],
        )
        assert len(steps) == self._work.steps
        return Side(
            seconds=self._work.groups * GROUP_SIZE / outcome.samples_per_s,
            engine_busy=_over_time(steps, "engine_busy"),
            trainer_busy=_over_time(steps, "trainer_busy"),
            staleness_max=outcome.staleness_max,
        )

    async def alone(self, threads: Threads) -> Alone:
        """Runs each half by itself, scaled to the whole work."""
        return Alone(await self._generation_s(threads), await self._training_s(threads))

    async def _generation_s(self, threads: Threads) -> float:
        """Seconds of generation at the engine's rate while requests wait for a place."""
        work, service = self._work, self._prepared.service
        tokens = sum(sum(work.lengths(index)) for index in range(work.groups))
        async with (
            answering(replace(self._prepared, threads=threads)) as parts,
            asyncio.TaskGroup() as tasks,
        ):
            began_s, before = time.monotonic(), await parts.engines.pool.info()
            running = [
                tasks.create_task(parts.runner.rollouts(service.draw(Split.TRAIN, index), GROUP_SIZE))
                for index in range(work.groups)
            ]
            rate = await _rate_while_full(parts.engines.pool, running, began_s, before.tokens_drawn)
        return tokens / rate if rate else time.monotonic() - began_s

    async def _training_s(self, threads: Threads) -> float:
        """Seconds of training: a quarter of the steps, on rows of the right lengths, times four."""
        config = self._prepared.config
        async with local_ranks(self._new_folder() / "trainer.log", threads.trainer) as ranks:
            trainer = TrainerProcess(ranks)
            await trainer.start(self._prepared.model_dir, config, threads.trainer)
            await trainer.step(self._rows(config, 0))
            count = max(1, self._work.steps // 4)
            seconds = [(await trainer.step(self._rows(config, step))).seconds for step in range(count)]
        return sum(seconds) / count * self._work.steps

    def _rows(self, config: Config, step: int) -> list[tuple[Sample, ...]]:
        """Rows of a step: prompt and answer tokens of the given lengths, half of them rewarded."""
        prompt = tuple(self._prepared.renderer.prompt_ids((Message(Role.USER, PROMPT),)))
        first = step * self._work.groups_per_step
        indices = range(first, first + self._work.groups_per_step)
        groups = [_drawn_group(index, prompt, self._work.lengths(index)) for index in indices]
        return step_samples(groups, config.train, MOST_TOKENS)

    def _config(self, max_staleness: int, on_update: str, max_running: int) -> Config:
        return parse(
            {
                "run_dir": str(self._new_folder()),
                "tasks": [{"name": "lengths", "service": "jsonl", "path": "none"}],
                "rollout": {"group_size": GROUP_SIZE, "max_tokens": MOST_TOKENS},
                "engine": {"max_running": max_running, "on_update": on_update},
                "asynchrony": {"max_staleness": max_staleness, "late": "train"},
                "train": {"steps": self._work.steps, "groups_per_step": self._work.groups_per_step, "lr": 1e-5},
                "eval": {"every_steps": 0, "questions": 1},
                "checkpoint": {"every_steps": 1_000_000},
            }
        )

    def _new_folder(self) -> Path:
        self._runs += 1
        return self._folder / f"run{self._runs}"


async def _rate_while_full(
    engine: Engine, answering: Sequence[asyncio.Task[object]], began_s: float, drawn_before: int
) -> float:
    """Tokens per second up to the last moment at which requests waited for a place; 0 when none ever did.

    The first requests may not have reached the engine at the first poll, so that poll says nothing.
    """
    rate = 0.0
    while not all(task.done() for task in answering):
        await asyncio.sleep(0.1)
        info = await engine.info()
        if info.waiting:
            rate = (info.tokens_drawn - drawn_before) / (time.monotonic() - began_s)
        elif rate:
            break
    return rate


def _over_time(steps: Sequence[Record], share: str) -> float:
    """Mean of a share over the run: each step weighs as long as it took."""
    seconds = [1 / float(step["samples_per_s"] or 1.0) for step in steps]
    return fmean((float(step[share] or 0.0) for step in steps), weights=seconds)


def _drawn_group(index: int, prompt: tuple[int, ...], lengths: Sequence[int]) -> Group:
    """Builds a group with random tokens, as if an engine had sampled it."""
    generator = random.Random(index)
    rollouts = []
    for i, length in enumerate(lengths):
        tokens = tuple(generator.randrange(10, 100) for _ in range(length))
        completion = Completion(tokens, (-4.6,) * length, (0,) * length, FinishReason.LENGTH)
        rollouts.append(Rollout(f"{i}", (), (Turn(prompt, completion),), Reward(float(i % 2))))
    return Group(f"g{index}", Task(f"t{index}", "lengths", ()), tuple(rollouts), 0)
