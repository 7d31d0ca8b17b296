"""`python -m experiments.peer_teachers.budget`: how many right answers make a specialist, without peers."""

import json
import tempfile
import tomllib
from pathlib import Path

import torch

from experiments.peer_teachers.nodes import specialist_model
from experiments.peer_teachers.together import Student
from experiments.sapo.node import Scale, task_configs
from experiments.sapo.warm import BATCH
from shoal.tasks.library import Library
from shoal.types import Split

HERE = Path(__file__).parent
STEPS = (25, 50, 100, 200, 400, 800)
QUESTIONS = 60


def main() -> None:
    """Prints a line for each task: pairs of answers seen and held-out accuracy."""
    torch.set_num_threads(1)
    families = tomllib.loads((HERE / "experiment.toml").read_text())["families"]
    for family, pairs in families.items():
        with Library([task for task in task_configs() if task.name == family], 0) as library:
            held_out = [library.services[0].draw(Split.EVAL, i) for i in range(QUESTIONS)]
        found = []
        for steps in STEPS:
            with tempfile.TemporaryDirectory() as folder:
                scale = Scale(3, every=20, warm_steps=steps)
                model = specialist_model(Path(folder) / "model", family, pairs, 0, scale)
                found.append([steps * BATCH, *Student(model, 0, 0.0).accuracy([held_out])])
        print(json.dumps({"family": family, "answers_and_accuracy": found}), flush=True)


if __name__ == "__main__":
    main()
