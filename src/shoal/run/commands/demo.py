"""`shoal demo` trains a model on this machine: the embedded model within a minute, or a real one (`--real`)."""

import json
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from shoal.config import Config, load, parse
from shoal.files import cache_directory
from shoal.model.quantised import SMOLLM2
from shoal.model.renderer_loading import local_directory
from shoal.observe.report import write_report
from shoal.run.commands.starters import starter_folder
from shoal.run.demo_model.warm_start import demo_model

LARGEST_TERM = 20


def demo_config(run_dir: Path | None, seed: int, overrides: Sequence[str] = ()) -> Config:
    """Builds the demo's configuration: that of the starter `first`, trained for longer. Raises `ConfigError`."""
    folder = run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    longer = ["train.steps=400", "eval.questions=256", "engine.gpus=shared", "checkpoint.every_steps=50"]
    named = [f"run_dir={json.dumps(str(folder))}", f"seed={seed}"]
    return load(starter_folder("first") / "run.toml", [*named, *longer, *overrides])


def sums(largest: int) -> Iterator[dict[str, str]]:
    """Questions for each pair of numbers from 1 to `largest`."""
    for a, b in product(range(1, largest + 1), repeat=2):
        yield {"prompt": f"What is {a} + {b}?", "answer": str(a + b)}


def real_config(run_dir: Path | None, seed: int, overrides: Sequence[str] = ()) -> Config:
    """Builds the configuration of `--real`: SmolLM2-135M-Instruct learns sums. Raises `ConfigError`.

    It equals `examples/smollm2/train.toml`, with the questions in the cache.
    """
    questions = cache_directory() / f"sums-{LARGEST_TERM}.jsonl"
    questions.parent.mkdir(parents=True, exist_ok=True)
    questions.write_text("".join(json.dumps(row) + "\n" for row in sums(LARGEST_TERM)))
    folder = run_dir or Path("runs") / time.strftime("demo-real-%Y%m%d-%H%M%S")
    return parse(
        {
            "run_dir": str(folder),
            "seed": seed,
            "model": {"path": SMOLLM2, "dtype": "auto"},
            "tasks": [
                {"name": "sums", "service": "jsonl", "path": str(questions), "scorer": "number", "eval_share": 0.52},
            ],
            "rollout": {"group_size": 8, "max_tokens": 32},
            "train": {"steps": 40, "groups_per_step": 6, "lr": 1e-5},
            "eval": {"every_steps": 0, "questions": 201},
            "checkpoint": {"every_steps": 40},
        },
        overrides,
    )


def run_demo(config: Config) -> tuple[dict[str, object], str]:
    """Trains the model, made first if need be, and draws the report. Returns the figures and two sentences about them.

    `wall_s` excludes the making of the model.
    """
    from shoal.run.training import train_with_progress

    if config.model.path == SMOLLM2:
        local_directory(SMOLLM2)
        warm_start_s = 0.0
    else:
        warm_start_s = demo_model()[1]
    began_s = time.monotonic()
    result = train_with_progress(config)
    write_report(result.run_dir)
    words = (
        f"held-out accuracy, sampled: {result.accuracy_before:.1%} -> {result.accuracy_after:.1%}, "
        f"greedy: {result.greedy_before:.1%} -> {result.greedy_after:.1%}\n{result.improvement}"
    )
    return {**result.figures, "wall_s": time.monotonic() - began_s, "warm_start_s": warm_start_s}, words
