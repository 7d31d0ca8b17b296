"""`python -m experiments.sapo.replaced`: what stops the paper's three specialties that others stand in for."""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM

from experiments.grid import Record
from experiments.sapo.node import Scale
from experiments.sapo.warm import POOL, pools_of, taught
from shoal.config import TaskConfig
from shoal.model.renderer_loading import load_renderer
from shoal.run.demo_model.architecture import character_tokenizer
from shoal.tasks.library import Library
from shoal.types import Split, Task

HERE = Path(__file__).parent
QUESTIONS = 200
ANSWERS = 8
EASIEST = [
    {
        "name": "arc_1d",
        "params": {"min_size": 8, "max_size": 8, "num_train": 1},
        "rewrite": [[r"(?s)^.*?Input: *(.*?)\nOutput: *(.*?)\n.*Input:\n(.*)$", r"\1>\2,\3>"], [r"(?<=\d) (?=\d)", ""]],
    },
    {"name": "bf", "params": {"difficulty": 1}, "rewrite": [[r"(?s)^.*?\n\n(.*?)\n\n.*$", r"\1"]]},
    {
        "name": "propositional_logic",
        "params": {f"{end}_{what}": 1 + (what == "vars") for end in ("min", "max") for what in ("vars", "statements")},
        "rewrite": [[r"(?s)^.*Given:\n1\. (.*?)\n\.What.*$", r"\1"]],
    },
]
"""Settings, and what is left of a question: the numbers without spaces, the program, the first premise."""


def main() -> None:
    """Measures each specialty and writes replaced.json."""
    from shoal import procedural

    torch.set_num_threads(1)
    found = list[Record]()
    for settings in EASIEST:
        config = TaskConfig.model_validate(settings)
        with Library([config], 0) as library:
            held = [library.services[0].draw(Split.EVAL, index) for index in range(QUESTIONS)]
        with tempfile.TemporaryDirectory() as folder:
            said = answers(warm_model(Path(folder), config), held)
        scores = [
            [entry_score(procedural, task, text) for text in texts] for task, texts in zip(held, said, strict=True)
        ]
        copied = [entry_score(procedural, task, task.messages[-1].content) for task in held]
        found.append(
            {
                "name": config.name,
                "question_characters": round(fmean(len(task.messages[-1].content) for task in held), 1),
                "right": round(fmean(fmean(score == 1 for score in row) for row in scores), 4),
                "groups_with_a_right_answer": round(fmean(any(score == 1 for score in row) for row in scores), 4),
                "question_copied_scores_1": round(fmean(score == 1 for score in copied), 4),
            }
        )
        print(found[-1], flush=True)
    (HERE / "results" / "replaced.json").write_text(json.dumps(found, indent=1) + "\n")


def warm_model(folder: Path, config: TaskConfig) -> Path:
    """Makes a model that has seen right answers of one specialty, and nothing else."""
    rng = random.Random(0)
    (pool,) = pools_of([config], POOL)
    return taught(folder, character_tokenizer(), 0, Scale(), lambda: ((one := rng.choice(pool)), truth(one)))


def truth(task: Task) -> str:
    """The answer that a warm start shows: the truth, or a premise where there is none."""
    return (task.answer or task.messages[-1].content).replace(" ", "")


def entry_score(procedural: object, task: Task, text: str) -> float:
    """The dataset's own score of an answer, whose numbers the model writes without spaces."""
    spaced = " ".join(text) if task.service == "arc_1d" else text
    return float(procedural.entry_of(task.receipt).score(spaced))  # type: ignore[attr-defined]


@torch.no_grad()
def answers(folder: Path, tasks: list[Task]) -> list[list[str]]:
    """Sampled answers of a model to each question."""
    model, renderer = AutoModelForCausalLM.from_pretrained(folder), load_renderer(folder)
    torch.manual_seed(0)
    found = []
    for task in tasks:
        prompt = torch.tensor([renderer.prompt_ids(task.messages)])
        made = model.generate(
            prompt, do_sample=True, num_return_sequences=ANSWERS, max_new_tokens=24, top_k=0, use_cache=True
        )
        rows = [row[prompt.shape[1] :].tolist() for row in made]
        stop = set(renderer.stop_token_ids)
        found.append(
            [renderer.text(row[: next((i for i, t in enumerate(row) if t in stop), len(row))]) for row in rows]
        )
    return found


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") == "0":
        main()
    else:  # questions are reproducible in such a process only
        command = [sys.executable, "-m", "experiments.sapo.replaced"]
        sys.exit(subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}, check=False).returncode)
