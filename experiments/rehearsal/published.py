"""Published step times and speed-ups, and what the rehearsal says of the same runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.config import Config
from shoal.rehearsal.costs import GpuSplit, engine_cost, gpu_of, shape_of, smallest_engine, trainer_cost
from shoal.rehearsal.rehearse import rehearse
from shoal.rehearsal.scene import Figures, Scene, figures_of
from shoal.rehearsal.search import AnswerLengths

Row = Mapping[str, object]
NEMO = "https://docs.nvidia.com/nemo/rl/0.5.0/about/performance-summary.html (Nemo RL v0.4)"


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A published run; its GPUs work for one side after the other when `split` is None."""

    model: str
    gpu: str
    gpus: int
    groups: int
    size: int
    max_tokens: int
    mean_tokens: float
    prompt_tokens: int
    split: tuple[float, int] | None
    """Share of the engines, and `max_staleness`."""
    per_engine: int | None = None
    part: int = 1
    """Divisor of GPUs and batch: the load of a GPU stays, and the rehearsal takes less time."""


def rehearsed(run: PublishedRun) -> Figures:
    """Figures of a published run, rehearsed."""
    shape, gpu, gpus = shape_of(run.model), gpu_of(run.gpu), run.gpus // run.part
    each = run.per_engine or smallest_engine(shape, gpu, run.max_tokens + run.prompt_tokens)
    if run.split is None:
        split, bound = GpuSplit(gpus, gpus, each), 0
    else:
        engines = round(gpus * run.split[0]) // each * each
        split, bound = GpuSplit(gpus - engines, engines, each), run.split[1]
    answers = AnswerLengths.spread(run.mean_tokens, run.max_tokens, run.prompt_tokens)
    engine = engine_cost(shape, gpu, each, answers.mean + run.prompt_tokens, 256)
    config = Config.model_validate(
        {
            "tasks": [{"name": "published"}],
            "train": {"groups_per_step": run.groups // run.part, "steps": bound + (4 if bound == 0 else 8)},
            "rollout": {"group_size": run.size, "max_tokens": run.max_tokens},
            "asynchrony": {"max_staleness": bound},
            "engine": {"max_running": engine.places, "count": split.count},
            "eval": {"every_steps": 0, "questions": 1},
            "checkpoint": {"every_steps": 100_000},
        }
    )
    trainer = trainer_cost(shape, gpu, split.trainer)
    scene = Scene(config, engine, split.count, trainer, answers.length, answers.mean, run.prompt_tokens)
    return figures_of(scene, rehearse(scene), run.gpus)


AREAL = {
    # model, nodes of 8 GPUs, max_staleness, hours of the own synchronous system and of AReaL, steps
    "1.5B": ("qwen2.5-1.5b", 16, 8, 41.0, 14.8, 250),
    "7B": ("qwen2.5-7b", 24, 8, 57.7, 25.4, 250),
    "14B": ("qwen2.5-14b", 32, 4, 48.8, 21.9, 80),
    "32B": ("qwen2.5-32b", 48, 4, 51.1, 31.1, 60),
}
"""Table 1 of AReaL (arXiv 2505.24298). Its text gives 512 x 16 answers, 27,648 tokens, three quarters of the GPUs."""
AREAL_MEAN_TOKENS = 356_600 * 14.8 * 3600 / (250 * 8192)
"""Mean tokens of an answer: tokens per second of figure 5c (1.5B, eta 4) times hours over answers, of table 1's run."""


def areal() -> list[Row]:
    """Speed-ups of table 1."""
    rows: list[Row] = []
    for name, (model, nodes, bound, sync_hours, own_hours, steps) in AREAL.items():
        seconds = {}
        for kind, split in (("synchronous", None), ("asynchronous", (0.75, bound))):
            run = PublishedRun(model, "h800", 8 * nodes, 512, 16, 27_648, AREAL_MEAN_TOKENS, 512, split, part=8)
            seconds[kind] = rehearsed(run).step_s
        published, found = sync_hours / own_hours, seconds["synchronous"] / seconds["asynchronous"]
        rows.append(
            {
                "model": name,
                "published": round(published, 3),
                "rehearsed": round(found, 3),
                "error": round(found / published - 1, 3),
                "published_step_s": [round(3600 * hours / steps) for hours in (sync_hours, own_hours)],
                "rehearsed_step_s": [round(one) for one in seconds.values()],
            }
        )
    return rows


STEP_TIMES = {
    # model, 1-step off, longest row, mean row, GPUs, rollouts, GPUs of an engine, seconds
    "Llama 3.1 8B on policy": ("llama-3.1-8b", False, 4096, 1060, 16, 2048, 1, 97.7),
    "Llama 3.1 8B 1-step off": ("llama-3.1-8b", True, 4096, 1129, 16, 2048, 1, 74.6),
    "Qwen3-30B-A3B on policy": ("qwen3-30b-a3b", False, 4096, 3154, 32, 2048, 4, 225.0),
    "Qwen3-30B-A3B 1-step off": ("qwen3-30b-a3b", True, 4096, 3158, 32, 2048, 2, 244.0),
    "Qwen3-32B on policy": ("qwen3-32b", False, 4096, 3206, 32, 2048, 4, 393.0),
    "Qwen3-32B 1-step off": ("qwen3-32b", True, 4096, 3207, 64, 2048, 4, 215.0),
    "Qwen3-235B on policy": ("qwen3-235b-a22b", False, 8192, 5671, 128, 512, 16, 506.0),
    "Qwen3-235B 1-step off": ("qwen3-235b-a22b", True, 8192, 5691, 256, 512, 8, 241.0),
}
"""Total step times of NeMo RL on H100 (`NEMO`): all its rows but DeepSeek V3's. Off policy, half of the GPUs are
engines (its asynchronous recipes)."""
PROMPT_TOKENS = 100
"""Tokens of a prompt of OpenMathInstruct-2, about."""


def step_times() -> list[Row]:
    """Step times of another system."""
    rows: list[Row] = []
    for name, (model, off, longest, mean, gpus, rollouts, each, seconds) in STEP_TIMES.items():
        split = (0.5, 1) if off else None
        most, answer = longest - PROMPT_TOKENS, mean - PROMPT_TOKENS
        run = PublishedRun(model, "h100", gpus, rollouts // 16, 16, most, answer, PROMPT_TOKENS, split, each)
        found = rehearsed(run).step_s
        rows.append(
            {
                "run": name,
                "published_s": seconds,
                "rehearsed_s": round(found, 1),
                "error": round(found / seconds - 1, 3),
            }
        )
    return rows
