"""Splits that the search picks, and the best of all splits of the same GPUs."""

import math
from collections.abc import Mapping
from dataclasses import replace

from shoal.config import Config
from shoal.rehearsal.costs import GpuSplit
from shoal.rehearsal.rehearse import rehearse
from shoal.rehearsal.scene import figures_of
from shoal.rehearsal.search import SHORT_STEPS, AnswerLengths, hardware_of, scene_of, searched

CASES = (
    # model, GPUs, longest answer, mean answer, max_staleness
    ("qwen2.5-1.5b", 16, 16_384, 5_000, 4),
    ("qwen3-8b", 16, 8_192, 2_700, 2),
    ("qwen3-8b", 16, 2_048, 700, 0),
    ("llama-3.1-8b", 24, 4_096, 400, 8),
    ("qwen3-32b", 32, 8_192, 2_700, 1),
    ("qwen3-30b-a3b", 32, 4_096, 3_000, 1),
)


def splits() -> list[Mapping[str, object]]:
    """For each case tokens per second of the split that `searched` picks, and of all splits."""
    rows: list[Mapping[str, object]] = []
    for model, gpus, longest, mean, bound in CASES:
        config = Config.model_validate(
            {
                "model": {"path": model},
                "tasks": [{"name": "published"}],
                "train": {"groups_per_step": 32, "steps": SHORT_STEPS},
                "rollout": {"group_size": 8, "max_tokens": longest},
                "asynchrony": {"max_staleness": bound},
                "engine": {"max_running": 128},
                "eval": {"every_steps": 0, "questions": 1},
                "checkpoint": {"every_steps": 100_000},
            }
        )
        answers = AnswerLengths.spread(mean, longest, 256)
        hardware = hardware_of(config, f"{gpus // 4}+{gpus - gpus // 4}", "h100", answers, None)
        one = {"tokens_per_s": math.inf, "powers": (0,), "bounds": (bound,), "scales": (1,)}
        picked = searched(config, hardware, answers, **one)  # type: ignore[arg-type]
        each, rates = hardware.split.per_engine, dict[int, float]()
        for trainer in range(1, gpus - each + 1):
            split = GpuSplit(trainer, (gpus - trainer) // each * each, each)
            scene = scene_of(config, replace(hardware, split=split), answers)
            rates[trainer] = round(figures_of(scene, rehearse(scene), gpus, hardware.usd_per_gpu_hour).tokens_per_s)
        best = max(rates, key=lambda trainer: rates[trainer])
        rows.append(
            {
                "case": f"{model}, {gpus} H100, answers of {mean:,} of {longest:,} tokens, max_staleness {bound}",
                "picked": picked.split.trainer,
                "best": best,
                "picked_over_best": round(picked.figures.tokens_per_s / rates[best], 4),
                "tokens_per_s_by_trainer_gpus": rates,
            }
        )
    return rows
