"""Rows of GSM8K, MATH, MBPP and APPS, as JSONL and as Parquet."""

import asyncio
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from shoal.config import RewardConfig, TaskConfig
from shoal.errors import TaskError
from shoal.reward.service import RewardService
from shoal.tasks.dataset_formats import assertion_test
from shoal.tasks.jsonl import JsonlService
from shoal.types import Json, Reward, RewardStatus, Split, Task

GSM8K: Json = {"question": "Ann has 3 hens, each lays 6 eggs. How many?", "answer": "3 * 6 = <<3*6=18>>18\n#### 18"}
MATH: Json = {"problem": "Simplify $4/8$.", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 1"}
MBPP: Json = {
    "task_id": 1,
    "text": "Write a function to add.",
    "code": "def add(a, b): return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add({1}, 2) is None"],
    "test_setup_code": "",
}
APPS: Json = {
    "question": "Add the two numbers.",
    "input_output": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]}),
    "solutions": json.dumps(["print(sum(map(int, input().split())))"]),
    "difficulty": "introductory",
}
APPS_CALL: Json = {
    "question": "Add.",
    "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}),
    "starter_code": "class Solution:\n    def add(self, a, b):",
}


def tasks(path: Path, rows: list[Json]) -> list[Task]:
    """All tasks of a file of these rows, whichever split they are in."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    service = JsonlService(TaskConfig(name="t", service="jsonl", path=str(path), eval_share=0.5), 0)
    return [service.draw(split, index) for split in Split for index in range(len(rows))]


def one(path: Path, row: Json) -> Task:
    assert isinstance(row, dict)
    key = next(key for key in ("question", "problem", "text") if key in row)
    return tasks(path, [{**row, key: f"{row[key]} ({number})"} for number in range(12)])[0]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_gsm8k_and_math_rows_become_tasks_for_the_math_checker(tmp_path: Path, name: str) -> None:
    grade_school, competition = one(tmp_path / name, GSM8K), one(tmp_path / name, MATH)
    assert grade_school.answer == "18"
    assert json.loads(grade_school.info) == {"scorer": "math"}
    assert competition.answer == "It is $\\boxed{\\frac{1}{2}}$."
    assert json.loads(competition.info) == {"level": "Level 1", "scorer": "math"}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_mbpp_and_apps_rows_become_tasks_with_unit_tests(tmp_path: Path, name: str) -> None:
    mbpp, stdin, call = (one(tmp_path / name, row) for row in (MBPP, APPS, APPS_CALL))
    assert "assert add(1, 2) == 3" in mbpp.messages[0].content
    assert json.loads(mbpp.info)["tests"] == [
        {"call": "add", "args": [1, 2], "returns": 3},
        {"code": "assert add({1}, 2) is None"},
    ]
    set_up = one(tmp_path / name, {**MBPP, "test_setup_code": "x = 1"})
    assert json.loads(set_up.info)["tests"][1] == {"code": "x = 1\nassert add({1}, 2) is None"}
    assert json.loads(stdin.info)["tests"] == [{"stdin": "1 2\n", "stdout": "3\n"}]
    listed = json.dumps({"inputs": [["1 2", 3]], "outputs": [[6]]})
    lines = one(tmp_path / name, {**APPS, "input_output": listed})
    assert json.loads(lines.info)["tests"] == [{"stdin": "1 2\n3", "stdout": "6"}]
    assert stdin.answer == "print(sum(map(int, input().split())))"
    assert [test["call"] for test in json.loads(call.info)["tests"]] == ["Solution.add"] * 2
    assert [test["returns"] for test in json.loads(call.info)["tests"]] == [3, 7]
    assert call.messages[0].content.endswith("def add(self, a, b):")


@pytest.mark.parametrize(
    ("assertion", "test"),
    [
        ('assert f([1]) == {"a": [1, [2]]}', {"call": "f", "args": [[1]], "returns": {"a": [1, [2]]}}),
        ("assert f([1]) == (1, [2])", {"code": "x = 1\nassert f([1]) == (1, [2])"}),
        ("assert f(1) == {2}", {"code": "x = 1\nassert f(1) == {2}"}),
        ("assert f((1, 2)) == 3", {"code": "x = 1\nassert f((1, 2)) == 3"}),
        ("assert f({1: 2}) == 3", {"code": "x = 1\nassert f({1: 2}) == 3"}),
    ],
)
def test_an_assertion_becomes_a_call_where_json_carries_its_values(assertion: str, test: Json) -> None:
    assert assertion_test(assertion, "x = 1") == test


@pytest.mark.parametrize("value", ["True", "1", "[True]", "0"])
def test_a_value_that_python_takes_for_a_truth_stays_an_assertion(value: str) -> None:
    assert assertion_test(f"assert f(1) == {value}") == {"code": f"assert f(1) == {value}"}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"question": "q", "answer": [3]}, r":1: answer: expected text, got \[3\]"),
        ({"problem": "p", "solution": ""}, ":1: solution: expected text"),
        ({"text": "t", "test_list": "assert f() == 1"}, ":1: test_list: expected a list"),
        ({"text": "t", "test_list": ["assert ("]}, ":1: test_list: expected assertions"),
        ({"question": "q", "input_output": "{"}, ":1: input_output: expected JSON"),
        ({"question": "q", "input_output": '{"inputs": [1], "outputs": []}'}, ":1: input_output: expected as many"),
        ({"prompt": "p", "info": {"tests": [{}]}}, r":1: info\.tests: \[0\]: expected one of stdout"),
        ({"prompt": "p", "info": {"scorer": "code"}}, r":1: info\.tests: expected at least one test"),
    ],
)
def test_a_wrong_row_is_named_with_its_column(tmp_path: Path, row: Json, complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint):
        tasks(tmp_path / "rows.jsonl", [row])


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("{}")
    with pytest.raises(TaskError, match="expected a Parquet file"):
        JsonlService(TaskConfig(name="t", service="jsonl", path=str(tmp_path / "rows.parquet")), 0)


SAMPLES = Path(__file__).parents[2] / "examples" / "data"


def solution(row: dict[str, str]) -> str:
    """The right answer that a row comes with."""
    if "solutions" in row:
        return str(json.loads(row["solutions"])[0])
    return row.get("code") or row.get("solution") or row["answer"]


@pytest.mark.parametrize("name", ["gsm8k", "math", "mbpp", "apps"])
def test_the_solutions_of_the_sample_questions_are_right_and_others_wrong(name: str) -> None:
    path = SAMPLES / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    questions = [str(row.get("question") or row.get("problem") or row.get("text")) for row in rows]
    service = JsonlService(TaskConfig(name="t", service="jsonl", path=str(path), eval_share=0.5), 0)
    drawn = {
        task.id: task for split in Split for index in range(3 * len(rows)) for task in [service.draw(split, index)]
    }

    async def work() -> list[list[Reward]]:
        async with RewardService(RewardConfig(workers=1)) as scorer:
            found = []
            for task in drawn.values():
                number = next(i for i, question in enumerate(questions) if question in task.messages[-1].content)
                found.append(await scorer.score(task, [solution(rows[number]), solution(rows[number - 1])]))
            return found

    for rewards in asyncio.run(work()):
        assert [(reward.status, reward.value) for reward in rewards] == [
            (RewardStatus.SCORED, 1.0),
            (RewardStatus.SCORED, 0.0),
        ], rewards


def test_every_column_that_is_not_converted_reaches_the_reward(tmp_path: Path) -> None:
    for row in (GSM8K, MATH, MBPP, APPS, {"question": "Which?", "answer": 2}):
        assert isinstance(row, dict)
        info = json.loads(one(tmp_path / "rows.jsonl", {**row, "options": ["a", "b"], "source": "quiz"}).info)
        assert (info["options"], info["source"]) == (["a", "b"], "quiz")


def test_a_number_is_an_answer_under_every_format(tmp_path: Path) -> None:
    rows: list[Json] = [{name: "q", "answer": value} for name in ("question", "problem") for value in (3, 2.5)]
    assert [one(tmp_path / "rows.jsonl", row).answer for row in rows] == ["3", "2.5"] * 2


@pytest.mark.parametrize("empty", ["", None, "{}", {"inputs": [], "outputs": []}])
def test_a_question_without_tests_is_left_out_and_counted(tmp_path: Path, empty: Json) -> None:
    assert isinstance(APPS, dict)
    rows = [{**APPS, "question": f"Add {n} numbers."} for n in range(4)] + [{**APPS, "input_output": empty}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    service = JsonlService(TaskConfig(name="t", service="jsonl", path=str(path), eval_share=0.5), 0)
    assert sum(len(service.tasks(split)) for split in Split) == 4
    assert service.notes == [
        f"1 of 5 rows are left out, the first is {path}:5: input_output: expected inputs and outputs, got none"
    ]
