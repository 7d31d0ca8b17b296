"""What is shown of a run while it goes on."""

import contextlib
import io
import os
import pty
import threading
from pathlib import Path

from shoal.observe.metrics import Record
from shoal.observe.progress import LiveProgress, sparkline


def step(number: int, **values: float | None) -> Record:
    return {"kind": "step", "step": number, "time_s": 1.0, "reward": 0.5, **values}


def plain_lines(records: list[Record], *, every_s: float = 5.0, now: list[float] | None = None) -> list[str]:
    """What is written when standard error is not a terminal, the clock read once per step."""
    stream, times = io.StringIO(), iter(now or [0.0] * 100)
    with LiveProgress(100, 2, stream=stream, every_s=every_s, clock=times.__next__) as progress:
        for record in records:
            progress.update(record)
    return stream.getvalue().splitlines()


def shown_on_a_terminal(records: list[Record]) -> str:
    """What a terminal receives."""
    ours, theirs = pty.openpty()
    received = bytearray()

    def receive() -> None:
        with contextlib.suppress(OSError):  # what a terminal's end says when the other one has closed
            while part := os.read(ours, 1 << 16):
                received.extend(part)

    reader = threading.Thread(target=receive)
    reader.start()
    with os.fdopen(theirs, "w") as stream, LiveProgress(100, 2, stream=stream) as progress:
        for record in records:
            progress.update(record)
    reader.join()
    os.close(ours)
    return received.decode()


def test_plain_lines_say_everything_once_and_in_words() -> None:
    values = {"staleness_mean": 1.25, "staleness_max": 2, "tokens_per_s": 12345.6, "samples_per_s": 700}
    (line,) = plain_lines([step(7, **values, engine_busy=0.914, trainer_busy=0.8)])
    assert line == (
        "step 7/100  reward 0.500  staleness 1.2, max 2 of 2  speed 12,346 tokens/s, 700 samples/s  "
        "busy engine 91%, trainer 80%"
    )


def test_plain_lines_of_steps_are_seconds_apart_and_the_last_step_is_always_there() -> None:
    lines = plain_lines([step(1), step(2), step(3), step(100)], now=[0.0, 4.9, 5.1, 5.2])
    assert [line.split()[1] for line in lines] == ["1/100", "3/100", "100/100"]


def test_evaluations_and_events_are_never_left_out() -> None:
    lines = plain_lines(
        [
            {"kind": "eval", "step": 0, "time_s": 0.0, "sampled": 0.25, "greedy": 0.5, "questions": 64},
            step(1),
            {"kind": "event", "name": "parity", "time_s": 0.1, "mismatch": 1.5e-7},
            {"kind": "eval", "step": 1, "time_s": 0.2, "sampled": 0.5, "greedy": None, "questions": 64},
        ]
    )
    assert lines[0] == "held-out after 0 steps: full marks sampled 0.250, greedy 0.500"
    assert lines[2:] == ["parity: mismatch 1.5e-07", "held-out after 1 steps: full marks sampled 0.500"]


def test_mean_rewards_stand_before_full_marks_which_partial_credit_never_reaches() -> None:
    values = {"sampled": 0.0, "greedy": 0.0, "sampled_reward": 0.5, "greedy_reward": 0.625}
    (line,) = plain_lines([{"kind": "eval", "step": 4, "time_s": 0.0, **values}])
    assert line == (
        "held-out after 4 steps: reward sampled 0.500, greedy 0.625; full marks sampled 0.000, greedy 0.000"
    )


def test_a_warning_stays_in_the_panel_when_other_events_come() -> None:
    why = "scorer: failed: mine:boom: ZeroDivisionError: division by zero (mine.py:2 in boom)"
    events: list[Record] = [
        {"kind": "event", "name": "rollout_failed", "time_s": 0.0, "reason": why},
        {"kind": "event", "name": "prometheus", "time_s": 0.0, "url": "http://127.0.0.1:1"},
    ]
    last = shown_on_a_terminal(events).rpartition("╭")[2]
    assert "prometheus" in last
    assert "ZeroDivisionError" in last


def test_numbers_that_are_missing_are_dashes() -> None:
    (line,) = plain_lines([{"kind": "step", "step": 1, "reward": None}])
    assert line.startswith("step 1/100  reward -  staleness -, max - of 2")


def test_a_terminal_gets_one_panel_with_the_newest_numbers() -> None:
    evals: list[Record] = [
        {"kind": "eval", "step": n, "time_s": 0.0, "sampled": score, "greedy": 0.5}
        for n, score in ((0, 0.25), (9, 0.75))
    ]
    shown = shown_on_a_terminal([evals[0], *(step(n, staleness_max=2) for n in range(1, 10)), evals[1]])
    last = shown.rpartition("╭")[2]
    assert "9 of 100" in last
    assert "sampled 0.250 → 0.750" in last
    assert "max 2 of 2" in last


def test_markup_in_a_name_is_shown_as_it_is() -> None:
    assert "[red]lost[/red]" in shown_on_a_terminal([{"kind": "event", "name": "[red]lost[/red]", "time_s": 0.0}])


def test_standard_output_stays_free_for_results(tmp_path: Path, capsys) -> None:
    with LiveProgress(10, 0) as progress:
        progress.update(step(1))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("step 1/10")


def test_a_sparkline_keeps_to_its_width_and_shows_the_trend() -> None:
    assert sparkline(float(i) for i in range(800)) == "".join(bar * 5 for bar in "▁▂▃▄▅▆▇█")
    assert sparkline([]) == ""
    assert sparkline([float("nan"), 1.0]) == "▄"
