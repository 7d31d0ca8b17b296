"""An evaluation answers each held-out question once, and says when there are fewer than asked."""

import json
import random
from pathlib import Path

import pytest

from shoal.config import TaskConfig
from shoal.rollout.evaluation import held_out_tasks
from shoal.tasks.jsonl import JsonlService
from shoal.tasks.sdk import Question, environment
from shoal.types import Split


@pytest.mark.parametrize("asked", [1, 5, 128])
def test_no_held_out_question_is_repeated_to_fill_a_number(asked: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Question {n % 30}?", "answer": str(n % 30), "row": n} for n in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    service = JsonlService(TaskConfig(name="quiz", service="jsonl", path=str(path), eval_share=0.4), 0)
    distinct = {task.messages for task in service.tasks(Split.EVAL)}
    tasks, told = held_out_tasks(service, asked)
    questions = [task.messages for task in tasks]
    assert len(questions) == len(set(questions)) == min(asked, len(distinct))
    if asked == 128:
        assert set(questions) == distinct
        assert told.startswith(f"eval.questions asks for 128 held-out questions, of which {len(distinct)} are distinct")


class Game:
    """Asks in equal words for a number that only `info` holds."""

    def draw(self, rng: random.Random) -> Question:
        number = rng.randint(1, 10**9)
        return Question("Guess my number.", info={"number": number}, split_by=str(number))

    def score(self, answer: str, number: int) -> float:
        return float(answer == str(number))


def test_games_with_equal_words_and_another_state_are_different_questions() -> None:
    tasks, told = held_out_tasks(environment("game")(Game), 16)
    assert (len(tasks), told) == (16, "")
