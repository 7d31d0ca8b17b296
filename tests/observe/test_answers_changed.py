"""Held-out questions with their answers before and after training."""

from pathlib import Path

from shoal.observe.metrics import JsonlTracker, read_run
from shoal.observe.progress import change_lines, changes
from shoal.observe.report import result_html, write_report


def write_answers(run_dir: Path, steps: dict[int, list[str]], question: str = "reverse river") -> None:
    """Metrics of a run with one answer per question at each evaluation; 'revir' earns 1."""
    tracker = JsonlTracker(run_dir / "metrics.jsonl")
    for step, answers in steps.items():
        tracker.log(max(step, 1), {"reward": 0.5})
        for place, answer in enumerate(answers):
            named = {"number": place, "task": "words", "question": question, "truth": "revir", "reason": ""}
            tracker.write("answer", {"step": step, **named, "answer": answer, "reward": float(answer == "revir")})
    tracker.close()


def test_each_question_is_shown_with_its_first_and_its_last_answer(tmp_path: Path) -> None:
    write_answers(tmp_path, {0: ["ervir", "x"], 5: ["rivir", "y"], 9: ["revir", "revir"]})
    run = read_run(tmp_path)
    assert [(one.before["answer"], one.after["answer"]) for one in changes(run)] == [("ervir", "revir"), ("x", "revir")]
    assert list(change_lines(run, 80))[:3] == [
        "'reverse river'  right: 'revir'",
        "  before  'ervir'  reward 0",
        "  after   'revir'  reward 1",
    ]


def test_an_evaluation_that_a_resume_repeats_counts_once_as_it_was_last(tmp_path: Path) -> None:
    write_answers(tmp_path, {0: ["ervir"], 5: ["rivir"]})
    write_answers(tmp_path, {5: ["revir"]})
    (one,) = changes(read_run(tmp_path))
    assert one.after["answer"] == "revir"


def test_before_the_second_evaluation_nothing_has_changed(tmp_path: Path) -> None:
    write_answers(tmp_path, {0: ["ervir"]})
    assert changes(read_run(tmp_path)) == []


def test_lines_keep_to_their_width_and_show_control_characters_as_text(tmp_path: Path) -> None:
    write_answers(tmp_path, {0: ["a\x1b[2J" + "b" * 500], 9: ["\u202e" + "c" * 500]}, question="q" * 500)
    for width in (40, 80, 200):
        lines = list(change_lines(read_run(tmp_path), width))
        assert max(map(len, lines)) <= width
        assert all(line.isprintable() for line in lines)


def test_report_and_notebook_show_the_answers_as_text(tmp_path: Path) -> None:
    write_answers(tmp_path, {0: ["<script>alert(1)</script>"], 9: ["revir"]})
    write_report(tmp_path)
    for html in ((tmp_path / "report.html").read_text(), result_html(tmp_path)):
        assert "Sampled answers to held-out questions" in html
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
        assert "<script" not in html
        assert "After 9 steps" in html
