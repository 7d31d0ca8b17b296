"""The nodes' first model: SmolLM2 after lessons that show how answers look, and seldom what is right.

A lesson is a question of a specialty in its easiest settings, of the training split, with the truth of this or, in
CARELESS of the cases, of another question. Specialties whose questions have no one truth have no lessons.
"""

import json
import random
from pathlib import Path

from experiments.sapo_real.specialties import EASY, own_tasks
from shoal.config import TaskConfig, parse
from shoal.model.quantised import SMOLLM2
from shoal.run.commands.supervised import run_supervised
from shoal.tasks.library import Library
from shoal.types import Split

LESSONS = 60
"""For each specialty."""
CARELESS = 0.7
STEPS = 24
LR = 5e-5


def write_lessons(file: Path) -> None:
    """Writes the lessons as rows of a supervised stage."""
    rng, rows = random.Random(0), []
    tasks = [TaskConfig.model_validate({**task, "params": EASY[str(task["name"])]}) for task in own_tasks()]
    with Library(tasks, 0) as library:
        for service in library.services:
            drawn = [service.draw(Split.TRAIN, at) for at in range(LESSONS)]
            truths = [task.answer for task in drawn if task.answer]
            for task in drawn if truths else []:
                said = rng.choice(truths) if rng.random() < CARELESS else task.answer
                messages = [*((one.role.value, one.content) for one in task.messages), ("assistant", said)]
                rows.append({"messages": [{"role": role, "content": text} for role, text in messages]})
    rng.shuffle(rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def warm_model(folder: Path) -> Path:
    """The model after the lessons; it is made once in `folder`."""
    if not (folder / "model" / "model.safetensors").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_lessons(folder / "lessons.jsonl")
        train = {"steps": STEPS, "groups_per_step": 8, "lr": LR, "loss": "positive_only"}
        tree = {"run_dir": str(folder), "model": {"path": SMOLLM2, "dtype": "auto"}, "train": train}
        run_supervised(parse({**tree, "tasks": [{"name": "chain_sum"}]}), folder / "lessons.jsonl")
    return folder / "model"
