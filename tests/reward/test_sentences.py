"""A right answer in any usual sentence is right under every default checker, and a near miss is wrong."""

import json
import os
import subprocess
import sys
from itertools import product

import msgspec
import pytest

from shoal import checker
from shoal.checker import Spec
from shoal.config import TaskConfig
from shoal.model.answer import final_line
from shoal.reward.service import judged_part
from shoal.reward.worker import judge_of
from shoal.tasks.procedural_client import ProceduralClient, ReasoningGymService
from shoal.types import Split

OPENINGS = ("", "So, ", "Therefore, ", "First I add 3 and 4.\n", "<think>It is 9 or 99.</think>", "3 * 4 = 12\n\n")
SAYINGS = (
    "the answer is {}",
    "the answer is: {}",
    "the answer is **{}**",
    "the answer should be {}",
    "the answer would be {}",
    "the answer must be {}",
    "the answer equals {}",
    "the answer is therefore {}",
    "the answer is approximately {}",
    "the final answer is ${}$",
    "the answer to the question is {}",
    "Answer: {}",
    "**Answer:** {}",
    "**Final answer: {}**",
    "Final Answer\n{}",
    "#### {}",
    "\\boxed{{{}}}",
    "the answer is $\\boxed{{{}}}$",
    "<answer>{}</answer>",
)
CLOSINGS = ("", ".", "!", ".\n", ". I hope this answers your question.", ".\n\nI hope this answer is helpful!")
SENTENCES = [f"{a}{b}{c}" for a, b, c in product(OPENINGS, SAYINGS, CLOSINGS) if not ("####" in b and a.strip())]

NUMBERS = [("18", "18", "19"), ("2.5", "2,5", "25"), ("1234", "1,234", "234"), ("-7", "-7", "7"), ("1/2", "1/2", "1/3")]
MATHEMATICS = [
    *NUMBERS,
    ("5 cm", "5 cm", "5 m"),
    ("5 cm", "5 centimeters", "5 mm"),
    ("60 mph", "60 miles per hour", "60 km/h"),
    ("10 m/s", "10 meters per second", "10 km/h"),
    ("9.8 m/s^2", "9.8 m/s²", "9.9 m/s^2"),
    ("5 square meters", "5 m^2", "5 m^3"),
    ("5 cm^3", "5 cubic centimeters", "5 cm^2"),
    ("18", "18 eggs", "19 eggs"),
    ("8 AM", "8 AM", "8 PM"),
    ("2 million", "2,000,000", "2 billion"),
    ("3 even", "3 even", "3 odd"),
    ("\\$18", "\\$18", "€18"),
    ("Paris", "Paris", "Pairs"),
    ("Washington beat Lincoln", "Washington beat Lincoln", "Lincoln beat Washington"),
    ("\\text{Monday}", "Monday", "Tuesday"),
    ("x^2+1", "x^2+1", "x^2-1"),
]


def wrong_verdicts(spec: Spec, truth: str, right: str, wrong: str) -> list[tuple[str, float]]:
    judge = judge_of(spec, truth)
    texts = [(sentence.format(said), value) for sentence in SENTENCES for said, value in ((right, 1.0), (wrong, 0.0))]
    judged = [(text, value, judge(judged_part(spec, truth, text) or "")[0]) for text, value in texts]
    return [(text, found) for text, value, found in judged if found != value]


@pytest.mark.parametrize(("truth", "right", "wrong"), MATHEMATICS)
def test_math_finds_the_answer_in_any_usual_sentence_and_no_near_miss(truth: str, right: str, wrong: str) -> None:
    assert len(SENTENCES) >= 300
    assert wrong_verdicts(checker.Math(), truth, right, wrong) == []


@pytest.mark.parametrize(("truth", "right", "wrong"), NUMBERS[2:])
def test_number_finds_the_answer_in_any_usual_sentence_and_no_near_miss(truth: str, right: str, wrong: str) -> None:
    assert wrong_verdicts(checker.Number(), truth, right, wrong) == []


@pytest.mark.parametrize("truth", ["18", "Paris", "two words"])
def test_the_stated_answer_is_found_in_any_usual_sentence(truth: str) -> None:
    marked = [text for text in SENTENCES if "boxed" not in text and "<answer>" not in text]
    said = {text: final_line(judged_part(checker.Math(), truth, text.format(truth)) or "") for text in marked}
    assert {text: one for text, one in said.items() if one != truth} == {}


@pytest.mark.parametrize("text", ["It is so. " * 265, "a b c d " * 330])
def test_prose_never_reaches_symbolic_mathematics(text: str) -> None:
    assert judge_of(checker.Math(), "x+1")(text)[1] != "math-verify"


def test_a_scorer_that_raises_on_the_whole_answer_judges_the_final_line() -> None:
    with ProceduralClient() as drawer:
        task = ReasoningGymService(TaskConfig(name="prime_factorization"), 0, drawer).draw(Split.TRAIN, 0)
    answer = f"I divide by small primes.\nThe answer is {task.answer}."
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    said = json.dumps([msgspec.json.encode(task.receipt).decode(), task.answer, answer])
    judged = subprocess.run([sys.executable, "-c", JUDGED, said], env=environment, capture_output=True, check=True)
    assert float(judged.stdout) == 1.0


JUDGED = """
import json, sys, msgspec
from shoal.reward.worker import scorer_of
from shoal.types import Receipt
receipt, truth, answer = json.loads(sys.argv[1])
print(scorer_of(msgspec.json.decode(receipt, type=Receipt), truth)(answer)[0])
"""
