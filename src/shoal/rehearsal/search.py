"""Scenes from a configuration and GPUs or a run's log, and a search for the cheapest one of a token rate."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean

from shoal.config import Config
from shoal.errors import ConfigError, RunDirError
from shoal.experience.log import snapshot
from shoal.experience.raw import decode_rollout, read_groups
from shoal.rehearsal.costs import (
    DECODE_FIXED_S,
    MEMORY,
    TRAINING,
    GpuSplit,
    ModelShape,
    engine_cost,
    gpu_of,
    shape_of,
    smallest_engine,
    trainer_cost,
)
from shoal.rehearsal.engine import Length
from shoal.rehearsal.scene import USD_PER_GPU_HOUR, Figures, Scene, Spot, figures_of

DRAWS = 20_000
"""Lengths whose mean stands for that of the distribution."""
SHORT_STEPS = 12
"""Steps of a rehearsal within a search."""


BETTER = 1.02
"""Ratio of token rates from which a split counts as better."""


@dataclass(frozen=True, slots=True)
class AnswerLengths:
    """Lengths of prompts and answers, and the time to score one."""

    length: Length
    mean: float
    prompt_tokens: int
    solved: float = 0.5

    @classmethod
    def spread(cls, mean: float, most: int, prompt_tokens: int, spread: float = 0.7) -> "AnswerLengths":
        """Log-normal lengths of a mean, cut at `most`; `spread` is the standard deviation of the logarithm."""
        mu = math.log(mean) - spread * spread / 2
        for _ in range(8):  # the cut lowers the mean
            length = _lognormal(mu, spread, most)
            rng = random.Random(0)
            got = fmean(length(rng) for _ in range(DRAWS))
            mu += math.log(mean / got)
        return cls(length, got, prompt_tokens)

    @classmethod
    def of_run(cls, run_dir: Path) -> "AnswerLengths":
        """Lengths and rewards of a run's log. Raises `RunDirError` when it has no answer."""
        with snapshot(run_dir) as connection:
            turns = [
                (len(turn.rendered_ids), len(turn.completion.token_ids), rollout.reward.value)
                for group in read_groups(connection)
                for rollout in map(decode_rollout, group.bodies)
                for turn in rollout.turns[:1]
            ]
        if not turns:
            raise RunDirError(f"{run_dir}: expected a run with sampled answers, got none")
        lengths = [answer for _, answer, _ in turns]
        solved = min(max(fmean(float(reward > 0) for *_, reward in turns), 0.02), 0.98)
        return cls(lambda rng: rng.choice(lengths), fmean(lengths), round(fmean(p for p, *_ in turns)), solved)


def _lognormal(mu: float, spread: float, most: int) -> Length:
    return lambda rng: max(min(round(rng.lognormvariate(mu, spread)), most), 1)


@dataclass(frozen=True, slots=True)
class Hardware:
    """GPUs of a rehearsal."""

    gpu: str
    split: GpuSplit
    usd_per_gpu_hour: float

    @property
    def count(self) -> int:
        """GPUs in all."""
        return self.split.trainer + self.split.engines


def split_of(text: str, shape: ModelShape, gpu: str, context: float) -> GpuSplit:
    """GPUs from `TRAINER+ENGINES` or `TRAINER+ENGINESxGPUS_PER_ENGINE`. Raises `ConfigError`.

    >>> split_of("8+24x2", shape_of("qwen3-8b"), "h200", 8192)
    GpuSplit(trainer=8, engines=24, per_engine=2)
    """
    trainer, _, engines = text.partition("+")
    engines, _, per_engine = engines.partition("x")
    if not (trainer.isdecimal() and engines.isdecimal() and per_engine.isdecimal() >= bool(per_engine)):
        raise ConfigError(f"--gpus: expected TRAINER+ENGINES, such as 8+24 or 8+24x2, got {text!r}")
    each = int(per_engine) if per_engine else smallest_engine(shape, gpu_of(gpu), context)
    if int(trainer) < 1 or int(engines) < each:
        raise ConfigError(f"--gpus: expected at least 1 for the trainer and {each} for an engine, got {text!r}")
    return GpuSplit(int(trainer), int(engines), each)


def scene_of(config: Config, hardware: Hardware, answers: AnswerLengths, **more: object) -> Scene:
    """The scene of a run on GPUs. Raises `ConfigError` and `ModelError`."""
    shape, gpu, split = shape_of(config.model.path), gpu_of(hardware.gpu), hardware.split
    context = answers.prompt_tokens + answers.mean
    engine = engine_cost(shape, gpu, split.per_engine, context, config.engine.max_running)
    trainer = trainer_cost(shape, gpu, split.trainer)
    own = config.model_copy(update={"engine": config.engine.model_copy(update={"count": split.count, "urls": []})})
    made = Scene(own, engine, split.count, trainer, answers.length, answers.mean, answers.prompt_tokens)
    return replace(made, solved=answers.solved, **more)  # type: ignore[arg-type]


def answers_of(config: Config, like: Path | None, mean: int | None, prompt_tokens: int) -> AnswerLengths:
    """Lengths from a run's log, or from a mean: by default a third of `rollout.max_tokens`."""
    if like is not None:
        return AnswerLengths.of_run(like)
    most = config.rollout.max_tokens
    return AnswerLengths.spread(min(mean or max(most // 3, 1), most), most, prompt_tokens)


def hardware_of(config: Config, gpus: str, gpu: str, answers: AnswerLengths, usd: float | None) -> Hardware:
    """GPUs as the options name them. Raises `ConfigError` and `ModelError`."""
    context = config.rollout.max_tokens + answers.prompt_tokens
    gpu_of(gpu)
    price = USD_PER_GPU_HOUR[gpu.lower()] if usd is None else usd
    return Hardware(gpu, split_of(gpus, shape_of(config.model.path), gpu, context), price)


def step_cost(config: Config, hardware: Hardware, answers: AnswerLengths) -> dict[str, object]:
    """Expected seconds of a step by part, idle shares, and the split of these GPUs with the most tokens per second."""
    from shoal.rehearsal.rehearse import rehearse

    bound = config.asynchrony.max_staleness
    scene = scene_of(_short(config, bound, config.train.groups_per_step, config.engine.max_running), hardware, answers)
    figures = figures_of(scene, rehearse(scene), hardware.count, hardware.usd_per_gpu_hour)
    best = searched(config, hardware, answers, tokens_per_s=math.inf, powers=(0,), bounds=(bound,), scales=(1,))
    better = best.figures.tokens_per_s > BETTER * figures.tokens_per_s
    return {
        "generation_s": scene.sampling_s,
        "training_s": scene.training_s,
        "write_s": scene.trainer.write_s,
        "load_s": scene.engine.load_s,
        "step_s": figures.step_s,
        "tokens_per_s": figures.tokens_per_s,
        "engines_idle": figures.engines_idle,
        "trainer_idle": figures.trainer_idle,
        "staleness_mean": figures.staleness_mean,
        "usd_per_million_tokens": figures.usd_per_million_tokens,
        "better_split": best.sentence() if better else "none of those tried",
        "peaks": f"{hardware.gpu}: NVIDIA's data sheet",
        "training_efficiency": f"{TRAINING:g} of the FLOP/s: AReaL, arXiv 2505.24298, figure 6a",
        "decode_efficiency": f"{MEMORY:g} of the bytes/s and {DECODE_FIXED_S:g} s a step: its figure 6b",
    }


def _short(config: Config, bound: int, groups: int, running: int) -> Config:
    """A configuration of few steps, with another staleness bound, batch and concurrency."""
    train = config.train.model_copy(update={"steps": SHORT_STEPS, "groups_per_step": groups})
    asynchrony = config.asynchrony.model_copy(update={"max_staleness": bound})
    engine = config.engine.model_copy(update={"max_running": running})
    return config.model_copy(update={"train": train, "asynchrony": asynchrony, "engine": engine})


@dataclass(frozen=True, slots=True)
class RehearsedSettings:
    """Settings with their figures."""

    split: GpuSplit
    max_staleness: int
    groups_per_step: int
    max_running: int
    """Answers at once, of each engine."""
    figures: Figures

    def sentence(self) -> str:
        """The settings and their rate in words."""
        split, rate = self.split, self.figures.tokens_per_s
        return (
            f"{split.trainer}+{split.engines}x{split.per_engine} GPUs, "
            f"max_staleness {self.max_staleness}, {self.groups_per_step} groups a step, {self.max_running} answers at "
            f"once: {rate:.0f} tokens/s, {self.figures.usd_per_hour:.2f} USD/h"
        )


def searched(
    config: Config,
    hardware: Hardware,
    answers: AnswerLengths,
    *,
    tokens_per_s: float,
    bounds: Sequence[int] = (0, 1, 2, 4),
    powers: Sequence[int] = (-2, -1, 0, 1, 2),
    scales: Sequence[float] = (0.5, 1, 2),
    said: Callable[[RehearsedSettings], None] = lambda found: None,
    spot: Spot | None = None,
) -> RehearsedSettings:
    """The cheapest split and bound that reach a token rate; the fastest when none does.

    GPUs are those of `hardware` times powers of two down to a quarter and up to four times, with shares of the trainer
    from one to seven eighths. Where a number of GPUs is too slow, its best split is also tried with the batch and the
    concurrency times `scales`. A configuration whose sides alone are too slow is not rehearsed.
    """
    from shoal.rehearsal.rehearse import rehearse  # joins all parts of a run

    best: RehearsedSettings | None = None
    each = hardware.split.per_engine

    def tried(split: GpuSplit, bound: int, groups: int, running: int) -> RehearsedSettings | None:
        """The best so far, these settings included."""
        short = _short(config, bound, groups, running)
        scene = scene_of(short, replace(hardware, split=split), answers, spot=spot)
        possible = scene.rollouts * answers.mean / scene.step_s
        if best is not None and possible < min(tokens_per_s, best.figures.tokens_per_s):
            return best
        figures = figures_of(scene, rehearse(scene), split.trainer + split.engines, hardware.usd_per_gpu_hour)
        found = RehearsedSettings(split, bound, groups, running, figures)
        said(found)
        return found if best is None or _is_better(found, best, tokens_per_s) else best

    groups, running = config.train.groups_per_step, config.engine.max_running
    for count in (round(hardware.count * 2.0**power) for power in powers):
        for trainer in dict.fromkeys(max(round(count * eighths / 8), 1) for eighths in range(1, 8)):
            engines = (count - trainer) // each * each
            if engines < each:
                continue
            for bound in bounds:
                best = tried(GpuSplit(trainer, engines, each), bound, groups, running)
        if best is not None and best.figures.tokens_per_s < tokens_per_s:
            split, bound = best.split, best.max_staleness
            for batch, places in product(scales, scales):
                if (batch, places) != (1, 1):
                    best = tried(split, bound, max(round(groups * batch), 1), max(round(running * places), 1))
        if best is not None and best.figures.tokens_per_s >= tokens_per_s:
            break  # more GPUs cost more
    if best is None:
        raise ConfigError(f"--gpus: expected room for a trainer and an engine of {each} GPUs, got {hardware.count}")
    return best


def _is_better(one: RehearsedSettings, other: RehearsedSettings, tokens_per_s: float) -> bool:
    reach, others = one.figures.tokens_per_s >= tokens_per_s, other.figures.tokens_per_s >= tokens_per_s
    if reach != others:
        return reach
    if not reach:
        return one.figures.tokens_per_s > other.figures.tokens_per_s
    return one.figures.usd_per_hour < other.figures.usd_per_hour
