"""Nine specialties of reasoning-gym at which a model of 80,000 parameters can succeed, with shortened questions.

Six are the paper's. Three stand in: gcd for propositional_logic, whose scorer gives full marks for copying the premise,
spell_backward for arc_1d and count_bits for bf, which nothing of this size ever gets right. What is scored is the exact
truth, 1 or 0.
"""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass

from shoal.types import seed_for

POOL = 3000
HELD_OUT = 0.2
REJECTED = ("is {}", "{} ok", "?{}", "<{}>")
"""Formats that no scorer accepts, and that a warm start may teach."""
SETTINGS: dict[str, dict[str, object]] = {
    "base_conversion": {"min_base": 2, "max_base": 3, "min_value": 1, "max_value": 15},
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ["+", "-"],
        "allow_parentheses": False,
    },
    "fraction_simplification": {"min_value": 1, "max_value": 9, "min_factor": 2, "max_factor": 5, "styles": ["plain"]},
    "decimal_arithmetic": {
        "min_num_decimal_places": 0,
        "max_num_decimal_places": 0,
        "precision": 6,
        "min_terms": 2,
        "max_terms": 2,
    },
    "calendar_arithmetic": {"tasks": ["is_leap_year"], "year": 2000, "offset_upper_bound": 60},
    "binary_matrix": {"min_n": 2, "max_n": 2},
    "gcd": {"min_value": 1, "max_value": 20},
    "spell_backward": {"min_word_len": 3, "max_word_len": 3},
    "count_bits": {"min_n": 1, "max_n": 127},
}
SHORTER = (
    (r"^.*convert the (.*) number (\w+) to (.*)$", r"b \2 \1>\3"),
    (r"^Calculate (.*)\.$", r"c \1"),
    (r"^Simplify the fraction (\S+) .*$", r"f \1"),
    (r"^.*\n(.*) = \?$", r"d \1"),
    (r"^.*the year (\d+) .*$", r"y \1"),
    (r"^.*matrix below:\n(.*)$", r"m \1"),
    (r"^Find the Greatest.*: (\d+), (\d+)\..*$", r"g \1 \2"),
    (r"^Spell this word backward .*: (\w+)$", r"s \1"),
    (r"^How many 1 bits .* number (\d+)\?$", r"o \1"),
)
MOST_QUESTION, MOST_ANSWER = 10, 9
"""Characters; whatever is longer is no question of this experiment. The answers' room includes the end."""


@dataclass(frozen=True, slots=True)
class Question:
    """One of them."""

    task: str
    text: str
    truth: str


def shortened(question: str) -> str:
    """A question in few characters.

    >>> shortened("Calculate 4 - 1.")
    'c 4 - 1'
    """
    for pattern, replacement in SHORTER:
        found, count = re.subn(pattern, replacement, question.strip(), flags=re.DOTALL)
        if count:
            return found.replace("base-", "").replace("binary", "2").replace("\n", "/")
    return question


def drawn(count: int = POOL) -> list[Question]:
    """The questions of all specialties, each once; from a process of its own, as reasoning-gym wants it."""
    command = [sys.executable, "-m", "experiments.sapo_stacked.questions", str(count)]
    done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, check=True)
    return [Question(*row) for row in json.loads(done.stdout.splitlines()[-1])]


def split(questions: list[Question]) -> tuple[list[Question], list[Question]]:
    """(training, held out): by a hash of the question, so that they are the same in every run."""
    held = [one for one in questions if seed_for("held out", one.text) % 1000 < 1000 * HELD_OUT]
    return [one for one in questions if one not in set(held)], held


def lesson(question: Question, rejected: float, rng: random.Random) -> str:
    """What a warm start shows as the answer: the truth, mostly in a format that is rejected."""
    if rng.random() >= rejected:
        return question.truth
    return rng.choice(REJECTED).format(question.truth)[: MOST_ANSWER - 1]


def main(count: int) -> None:
    """Prints the questions as JSON."""
    import reasoning_gym

    found: dict[str, tuple[str, str, str]] = {}
    for task, settings in SETTINGS.items():
        dataset = reasoning_gym.create_dataset(task, size=count, seed=0, **settings)
        for i in range(count):
            text = shortened(dataset[i]["question"])
            truth = str(dataset[i]["answer"]).replace("\n", "/")
            if len(text) <= MOST_QUESTION and 0 < len(truth) < MOST_ANSWER - 1:
                found[text] = (task, text, truth)
    sys.stdout.write("\n" + json.dumps(list(found.values())) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
