"""Whether a run will get to an accuracy, said before its end."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_status import written_run

from cheap_runs import EVERY, GOALS, QUESTIONS, STEPS, coverage
from shoal.cli import main
from shoal.observe.forecast import DOUBT, forecast
from shoal.observe.metrics import JsonlTracker

RAW = Path(__file__).parents[2] / "benchmarks" / "results" / "cheap_runs.jsonl"
FLAT = [0.05] * 15


def test_forecasts_of_real_runs_of_the_trainer_hold_as_often_as_they_say() -> None:
    rows = [json.loads(line) for line in RAW.read_text().splitlines()]
    runs = [row["accuracies"] for row in rows if "accuracies" in row]
    each: list[tuple[Any, int]] = [(coverage(runs[::8]), len(runs[::8])), (rows[-1], len(runs))]
    for found, count in each:
        goals: dict[str, dict[str, int]] = found["goals"]
        assert found["runs"] == count
        assert set(goals) == set(map(str, GOALS))
        total = {name: sum(end[name] for end in goals.values()) for name in goals["0.5"]}
        assert total["wrongly"] <= 0.05 * total["reached"]
        assert total["given_up"] >= 0.5 * total["missed"]
        assert sum(found["inside_90"].values()) >= 0.85 * len(found["inside_90"])


def test_a_run_that_has_not_moved_is_given_up_late_and_one_that_rises_is_not() -> None:
    early, late = (forecast([EVERY * i for i in range(n)], FLAT[:n], QUESTIONS, STEPS) for n in (6, 15))
    assert early is not None
    assert late is not None
    assert late.chance(0.5) < DOUBT < early.chance(0.5)
    rising = forecast([0, 20, 40, 60], [0.05, 0.2, 0.45, 0.65], QUESTIONS, STEPS)
    assert rising is not None
    assert rising.gets_there(0.8)
    assert rising.chance(0.6) > rising.chance(0.8) > rising.chance(1.0)
    low, high = rising.bounds
    assert 0.5 < low < high <= 1


@pytest.mark.parametrize("steps", [[0, 25, 50], [0, 5, 10, 20], [0, 30, 60, 100]])
def test_too_few_evaluations_and_a_run_that_has_ended_have_no_forecast(steps: list[float]) -> None:
    assert forecast(steps, [0.1] * len(steps), QUESTIONS, STEPS) is None


def evaluated(run_dir: Path, count: int) -> Path:
    """A run of seven steps that has moved nothing in the evaluations so far."""
    written_run(run_dir)
    tracker = JsonlTracker(run_dir / "metrics.jsonl")
    for step in range(count):
        tracker.write("eval", {"step": step, "sampled": 0.05, "questions": 64})
    tracker.close()
    return run_dir


def status_code(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["status", *words])
    return int(str(ended.value.code))


@pytest.mark.parametrize(
    ("goal", "code", "said"), [(0.9, 1, "this run will not get to 90%"), (0.02, 0, "may get to 2%")]
)
def test_status_ends_with_1_when_a_run_will_not_get_there(
    goal: float, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = evaluated(tmp_path, 7)
    assert status_code(str(run), f"--goal={goal}") == code
    assert said in capsys.readouterr().out
    assert status_code(str(run), f"--goal={goal}", "--json") == code
    assert json.loads(capsys.readouterr().out)["forecast"]["gets_there"] is (code == 0)
    assert status_code(str(run)) == 0
    assert "will not" not in capsys.readouterr().out


def test_status_says_when_it_knows_too_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_code(str(evaluated(tmp_path, 3)), "--goal=0.9") == 0
    assert "no forecast: it needs 4" in capsys.readouterr().out
