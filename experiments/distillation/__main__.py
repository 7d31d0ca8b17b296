"""`python -m experiments.distillation [--seeds 1 2] [--steps 400] [--results DIR]`; the claim is in claim.md."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from shoal.config import Config, parse
from shoal.run.demo_model.warm_start import DEMO_TASK, Recipe, demo_model
from shoal.run.training import run_training

HERE = Path(__file__).parent
TEACHER = Recipe(layers=3, slip_share=0.0, long_share=0.5)
"""A larger model than the embedded one, whose own teacher never slipped."""


def settings(run_dir: Path, seed: int, model: Path, train: dict[str, JsonValue]) -> Config:
    """Configuration of a run on the demo's task."""
    return parse(
        {
            "run_dir": str(run_dir),
            "seed": seed,
            "model": {"path": str(model)},
            "tasks": [DEMO_TASK],
            "rollout": {"group_size": 8, "max_tokens": 12},
            "engine": {"max_running": 128},
            "asynchrony": {"max_staleness": 2},
            "train": {"groups_per_step": 8, "warmup_steps": 5, **train},
            "eval": {"every_steps": 0, "questions": 256},
        }
    )


def distilled(folder: Path, seed: int, steps: int) -> dict[str, object]:
    """Held-out accuracy of the teacher, and of the student before and after, sampled and greedy."""
    student, teacher = demo_model()[0], demo_model(TEACHER)[0]
    known = run_training(settings(folder / f"teacher-{seed}", seed, teacher, {"steps": 1, "lr": 1e-9})).figures
    train: dict[str, JsonValue] = {"steps": steps, "lr": 3e-4, "teacher": str(teacher)}
    learned = run_training(settings(folder / f"student-{seed}", seed, student, train)).figures
    found: dict[str, object] = {"seed": seed, "steps": steps, "wall_s": learned["wall_s"]}
    for kind in ("accuracy", "greedy"):
        top, before, after = (
            float(str(figures[f"{kind}_{when}"]))
            for figures, when in ((known, "before"), (learned, "before"), (learned, "after"))
        )
        closed = (after - before) / (top - before)
        found[kind] = {"teacher": top, "before": before, "after": after, "gap_closed": closed}
    return found


def main(arguments: Sequence[str]) -> None:
    """Measures every seed and writes `distillation.json`."""
    parser = argparse.ArgumentParser(prog="python -m experiments.distillation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = [distilled(Path(folder), seed, options.steps) for seed in options.seeds]
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "distillation.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
