"""Measuring, and what every tracker makes of it."""

import importlib.util
import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.config import MetricsConfig
from shoal.errors import ConfigError, RunDirError
from shoal.observe.charts import ANSWER_NAMES, CHARTS, EVAL_NAMES, STEP_NAMES
from shoal.observe.metrics import JsonlTracker, Record, read_records, trackers_of


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    heard: list[Record] = []
    trackers = trackers_of(MetricsConfig(), tmp_path, listeners=[heard.append])
    trackers.log(1, {"reward": 0.25, "reward/chain_sum": 0.25})
    trackers.log_eval(1, {"sampled": 0.5, "greedy": None})
    trackers.log_event("resumed", step=1, reason="crash")
    trackers.close()
    records = read_records(tmp_path / "metrics.jsonl")
    assert records == heard
    assert [record["kind"] for record in records] == ["step", "eval", "event"]
    assert records[0]["reward/chain_sum"] == 0.25
    assert records[1]["greedy"] is None
    assert records[2]["reason"] == "crash"


def test_numbers_that_are_not_finite_become_null_so_that_every_line_is_json(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"loss": math.nan, "ratio_max": math.inf, "lr": 1e-4})
    tracker.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (record["loss"], record["ratio_max"], record["lr"]) == (None, None, 1e-4)


def test_time_goes_on_where_it_stopped_when_a_run_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for clock in ([100.0, 107.5], [5000.0, 5001.0]):
        tracker = JsonlTracker(path, iter(clock).__next__)
        tracker.log(1, {})
        tracker.close()
    assert [record["time_s"] for record in read_records(path)] == [7.5, 8.5]


def test_a_torn_last_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind":"step","step":1,"time_s":1}\n{"kind":"step","step":2,"ti')
    tracker = JsonlTracker(path)
    tracker.log(3, {})
    tracker.close()
    assert [record["step"] for record in read_records(path)] == [1, 3]


def test_every_record_written_before_a_kill_is_there_after_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    script = (
        "import sys; from pathlib import Path; from shoal.observe.metrics import JsonlTracker\n"
        "tracker = JsonlTracker(Path(sys.argv[1]))\n"
        "for step in range(10**9):\n"
        "    tracker.log(step, {'reward': 0.5})\n"
        "    sys.stdout.write(f'{step}\\n'); sys.stdout.flush()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout as lines:
        acknowledged = [int(next(lines)) for _ in range(200)]
        os.kill(child.pid, signal.SIGKILL)
    child.wait()
    steps = [record["step"] for record in read_records(path)]
    assert steps[: len(acknowledged)] == acknowledged


def test_reading_metrics_that_are_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="expected a metrics file, got No such file"):
        read_records(tmp_path / "metrics.jsonl")


def test_metrics_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="expected to write metrics there"):
        trackers_of(MetricsConfig(), tmp_path / "missing")


@pytest.mark.parametrize("extra", ["tensorboard", "wandb"])
def test_an_adapter_logs_or_names_the_extra_that_brings_it(extra: str, tmp_path: Path) -> None:
    config = MetricsConfig(trackers=[f"{extra}:test"])
    if importlib.util.find_spec(extra) is None:
        with pytest.raises(ConfigError, match=rf"metrics\.trackers.*pip install 'shoal\[{extra}\]'"):
            trackers_of(config, tmp_path)
        assert not (tmp_path / "metrics.jsonl").exists()
        return
    os.environ.setdefault("WANDB_MODE", "offline")
    trackers = trackers_of(config, tmp_path)
    trackers.log(1, {"reward": 0.5})
    trackers.close()
    assert any(extra in path.name for path in tmp_path.iterdir())


def test_every_name_has_a_sentence() -> None:
    for meaning in (*STEP_NAMES.values(), *EVAL_NAMES.values(), *ANSWER_NAMES.values()):
        assert meaning[0].isupper() or meaning[0].isdigit() or meaning.startswith("`")
        assert meaning.endswith(".")


def test_every_chart_draws_numbers_that_are_recorded() -> None:
    known = {name.partition("<")[0] for name in (*STEP_NAMES, *EVAL_NAMES)}
    assert {name for charts in CHARTS.values() for chart in charts for name in (*chart.steps, *chart.evals)} <= known


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a full disk is to one file: the write that crosses the limit is short, the next one an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_record_that_the_disk_has_no_room_for_leaves_nothing_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"loss": 0.5})
    with files_of_at_most(path.stat().st_size + 20), pytest.raises(RunDirError, match="free space"):
        tracker.log(2, {"loss": 0.25})
    tracker.log(3, {"loss": 0.125})
    tracker.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]
