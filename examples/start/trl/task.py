"""Rows and reward functions of TRL as a task. The prompts are texts, so completions are texts too."""

import json
from pathlib import Path

from shoal.environments.trl import trl_environment


def right(completions, answer, **columns):
    """Gives 1 for the word backward."""
    return [float(said.strip() == truth) for said, truth in zip(completions, answer, strict=True)]


def as_long(completions, answer, **columns):
    """Gives 1 for an answer with as many letters as the truth."""
    return [float(len(said.strip()) == len(truth)) for said, truth in zip(completions, answer, strict=True)]


rows = [json.loads(line) for line in (Path(__file__).parent / "questions.jsonl").read_text().splitlines()]
words = trl_environment("words", rows, reward_funcs=[right, as_long], reward_weights=[1.0, 0.2])
