"""JSONL files as task services."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import TaskConfig
from shoal.errors import TaskError
from shoal.tasks.holdout import halves_of, split_of
from shoal.tasks.jsonl import JsonlService
from shoal.tasks.library import Library
from shoal.types import Json, Message, Role, Split


def written(folder: Path, rows: list[Json]) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return path


def numbered(count: int) -> list[Json]:
    return [{"prompt": f"Question {number}?", "answer": str(number)} for number in range(count)]


def service(path: Path, seed: int = 0, **fields: object) -> JsonlService:
    return JsonlService(
        TaskConfig.model_validate({"name": "quiz", "service": "jsonl", "path": str(path), **fields}), seed
    )


def epoch(tasks: JsonlService, split: Split, number: int, size: int) -> list[str]:
    return [tasks.draw(split, number * size + position).messages[-1].content for position in range(size)]


def test_each_epoch_goes_through_every_question_of_the_split_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    tasks = service(written(tmp_path, numbered(200)), eval_share=0.3)
    sizes = {split: len({tasks.draw(split, index).messages for index in range(200)}) for split in Split}
    assert sum(sizes.values()) == 200
    assert 30 < sizes[Split.EVAL] < 90
    for split, size in sizes.items():
        first, second = epoch(tasks, split, 0, size), epoch(tasks, split, 1, size)
        assert sorted(first) == sorted(second)
        assert len(set(first)) == size
        assert first != second
    train = [tasks.draw(Split.TRAIN, index).id for index in range(3 * sizes[Split.TRAIN])]
    assert len(set(train)) == len(train)  # random numbers are drawn by the id: none twice


def test_the_splits_share_no_question_even_when_a_file_repeats_them(tmp_path: Path) -> None:
    tasks = service(written(tmp_path, numbered(40) * 3), eval_share=0.5)
    train, held_out = ({tasks.draw(split, index).messages for index in range(120)} for split in Split)
    assert train.isdisjoint(held_out)
    assert len(train | held_out) == 40


def test_the_seed_of_the_run_moves_training_questions_and_leaves_the_held_out_ones(tmp_path: Path) -> None:
    path = written(tmp_path, numbered(100))
    one, other = service(path, seed=1), service(path, seed=2)
    assert epoch(one, Split.EVAL, 0, 20) == epoch(other, Split.EVAL, 0, 20)
    assert epoch(one, Split.TRAIN, 0, 20) != epoch(other, Split.TRAIN, 0, 20)
    assert epoch(one, Split.TRAIN, 3, 20) == epoch(service(path, seed=1), Split.TRAIN, 3, 20)


def test_prompts_may_be_messages_and_are_rewritten_under_a_system_prompt(tmp_path: Path) -> None:
    rows: list[Json] = [
        {"prompt": [{"role": "user", "content": f"Please say {number}."}], "answer": "x", "info": {"level": 3}}
        for number in range(30)
    ]
    tasks = service(
        written(tmp_path, rows),
        system_prompt="Be brief.",
        rewrite=[("Please s(?P<rest>ay)", r"S\g<rest>")],
        scorer="contains",
    )
    task = tasks.draw(Split.TRAIN, 0)
    assert task.messages[0] == Message(Role.SYSTEM, "Be brief.")
    assert task.messages[1].content.startswith("Say ")
    assert json.loads(task.info) == {"level": 3, "scorer": "contains"}


def test_a_system_message_of_its_own_and_a_scorer_of_its_own_take_the_place_of_the_configured_ones(
    tmp_path: Path,
) -> None:
    messages: list[Json] = [{"role": "system", "content": "Own."}, {"role": "user", "content": "Q"}]
    rows: list[Json] = [
        {"prompt": messages, "answer": "1", "info": {"scorer": "number"}},
        *numbered(40),
    ]
    tasks = service(written(tmp_path, rows), system_prompt="Configured.", eval_share=0.5)
    drawn = [tasks.draw(split, index) for split in Split for index in range(41)]
    own = next(task for task in drawn if task.id == "quiz/1")
    assert own.messages == (Message(Role.SYSTEM, "Own."), Message(Role.USER, "Q"))
    assert json.loads(own.info) == {"scorer": "number"}


FUNCTION: Json = {"name": "function", "path": "evil.py:reward"}
JUDGE: dict[str, Json] = {"name": "judge", "url": "https://mine/v1", "model": "m", "rubric": "r", "key_env": "KEY"}


@pytest.mark.parametrize(
    ("scorer", "is_own"),
    [
        (FUNCTION, False),
        ({**JUDGE, "url": "https://evil/v1"}, False),
        ({**JUDGE, "key_env": "HF_TOKEN"}, False),
        ({"name": "weighted", "parts": [{"scorer": "exact"}, {"scorer": FUNCTION}]}, False),
        ({**JUDGE, "rubric": "another", "model": "larger"}, True),
        ("exact", True),
    ],
)
def test_a_row_calls_no_function_and_asks_no_judge_but_the_configured_one(
    scorer: Json, is_own: bool, tmp_path: Path
) -> None:
    path = written(tmp_path, [{"prompt": "q", "answer": "1", "info": {"scorer": scorer}}, *numbered(9)])
    if is_own:
        assert service(path, scorer=JUDGE).questions
        return
    for configured in (JUDGE, "exact"):
        with pytest.raises(TaskError, match=r":1: info\.scorer: expected no function and no judge but"):
            service(path, scorer=configured)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: expected a JSON object"),
        ("[1]", r":2: expected a JSON object, got \[1\]"),
        ('{"answer": "1"}', ":2: prompt: expected text or a list of messages, got nothing"),
        ('{"prompt": "", "answer": "1"}', ":2: prompt: expected text"),
        ('{"prompt": "q", "answer": true}', ":2: answer: expected text or a number, got true"),
        ('{"prompt": "q", "answer": [1]}', r":2: answer: expected text or a number, got \[1\]"),
        ('{"prompt": "q", "answer": " "}', ":2: answer: expected text"),
        ('{"prompt": "q", "answer": "1", "info": "x"}', ":2: info: expected an object"),
        ('{"prompt": "q", "answer": "1", "info": {"scorer": "magic"}}', ":2: info.scorer: expected one of exact"),
        ('{"prompt": "q", "answer": "1", "scorer": "number"}', ":2: scorer: expected a column of another name"),
        ('{"prompt": "q", "answer": "1", "x": 1, "info": {"x": 2}}', ":2: x: expected a column of another name"),
        (
            '{"prompt": [{"role": "user"}], "answer": "1"}',
            r":2: prompt: .* `content` - at `\$\[0\]`",
        ),
        ('{"prompt": [{"role": "boss", "content": "x"}], "answer": "1"}', r":2: prompt: .*'boss' - at `\$\[0\].role`"),
        (
            '{"prompt": [{"role": "user", "content": 7}], "answer": "1"}',
            r":2: prompt: .* `int` - at `\$\[0\].content`",
        ),
        ('{"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}', ":2: prompt: expected a last message"),
    ],
)
def test_a_wrong_line_is_named_with_file_line_and_field(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "fine", "answer": "1"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(TaskError, match=f"questions.jsonl{message}"):
        service(path)


def test_a_file_that_is_missing_binary_or_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"nowhere\.jsonl: JSONL file not found"):
        service(tmp_path / "nowhere.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match="UTF-8"):
        service(tmp_path / "binary.jsonl")
    with pytest.raises(TaskError, match="expected two different questions at least, one is held out; got 1"):
        service(written(tmp_path, numbered(1)))


@given(count=st.integers(2, 12), eval_share=st.floats(1e-6, 1 - 1e-6))
def test_the_smallest_file_holds_out_a_question_and_trains_on_another(count: int, eval_share: float) -> None:
    questions = [f"What is {number} + 1?" for number in range(count)]
    halves = halves_of(questions, eval_share)
    assert set(halves) == set(Split)
    assert halves == halves_of(questions[::-1], eval_share)[::-1]
    assert halves_of(questions[:1] * 2, eval_share) == [split_of(questions[0], eval_share)] * 2, "one text has one half"


def test_numbers_are_answers_and_other_columns_reach_reward_functions(tmp_path: Path) -> None:
    rows: list[Json] = [{"prompt": f"{i}?", "answer": 0.5 * i, "level": i, "info": {"source": "own"}} for i in range(4)]
    tasks = service(written(tmp_path, rows), scorer={"name": "function", "path": "rewards:by_level"})
    drawn = {task.id.split("/")[1]: task for split in Split for task in tasks.tasks(split)}
    assert [drawn[str(i + 1)].answer for i in range(4)] == ["0.0", "0.5", "1.0", "1.5"]
    given = json.loads(drawn["3"].info)
    assert (given["level"], given["source"]) == (2, "own")


@pytest.mark.parametrize("rewrite", [[("(", "x")], [("a", r"\1")], [("(a)", r"\2")], [("(?P<n>a)", r"\g<m>")]])
def test_a_rewrite_that_cannot_work_is_refused(tmp_path: Path, rewrite: list[tuple[str, str]]) -> None:
    with pytest.raises(TaskError, match=r"quiz: rewrite\.0"):
        service(written(tmp_path, numbered(30)), rewrite=rewrite)


@given(
    share=st.floats(0.05, 0.5),
    more=st.floats(0.0, 0.4),
    system=st.sampled_from(["", "Be brief."]),
    rewrite=st.booleans(),
    spaced=st.booleans(),
)
def test_no_setting_trains_on_a_question_that_was_held_out(
    share: float, more: float, system: str, rewrite: bool, spaced: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("split")
    plain = service(written(folder, numbered(60)), eval_share=share)
    held = {task.answer for task in plain.tasks(Split.EVAL)}
    rows: list[Json] = [
        {"prompt": f"\tquestion  {n}?\n" if spaced else f"Question {n}?", "answer": str(n)} for n in range(60)
    ]
    other = service(
        written(folder, rows),
        eval_share=share + more,
        system_prompt=system,
        rewrite=[("(?i)question", "Q")] if rewrite else [],
    )
    assert held <= {task.answer for task in other.tasks(Split.EVAL)}


def test_tasks_of_a_run_share_one_split(tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    many, few = written(tmp_path, numbered(100)), written(tmp_path / "few", numbered(3))
    tables = [
        TaskConfig(name=name, service="jsonl", path=str(path), eval_share=share)
        for name, path, share in (("many", many, 0.1), ("few", few, 0.4))
    ]
    with Library(tables, 0) as library:
        halves = {split: {library.draw(split, index).answer for index in range(400)} for split in Split}
    assert not halves[Split.TRAIN] & halves[Split.EVAL]
    assert len(halves[Split.EVAL]) > 25


def test_rows_that_differ_in_any_message_are_different_questions(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "Summarise."}]
    file = tmp_path / "documents.jsonl"
    prompts = [[{"role": "system", "content": f"Document {n}"}, *asked] for n in range(9)]
    file.write_text("".join(json.dumps({"prompt": one, "answer": "x"}) + "\n" for one in prompts))
    service = JsonlService(TaskConfig(name="documents", service="jsonl", path=str(file), scorer="exact"), 0)
    assert all(service.tasks(split) for split in Split)
