"""What is shown of a run while it goes on."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading
from pathlib import Path

import pytest

from shoal.observe.metrics import Record, stage
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


def sized(terminal: int, columns: int) -> None:
    """Gives a terminal a size, as a window's manager does."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))


def shown_on_a_terminal(records: list[Record], columns: int = 80, later: int = 0, **environment: str) -> str:
    """What a terminal receives, which has `later` columns before the last record."""
    ours, theirs = pty.openpty()
    sized(theirs, columns)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TERM": "xterm-256color", **environment}.items():
            patch.setenv(name, value)
        patch.delenv("COLUMNS", raising=False)
        return _received(ours, theirs, records, later)


def _received(ours: int, theirs: int, records: list[Record], later: int) -> str:
    received = bytearray()

    def receive() -> None:
        with contextlib.suppress(OSError):  # what a terminal's end says when the other one has closed
            while part := os.read(ours, 1 << 16):
                received.extend(part)

    reader = threading.Thread(target=receive)
    reader.start()
    with os.fdopen(theirs, "w") as stream, LiveProgress(100, 2, stream=stream, clock=lambda: 0.0) as progress:
        for record in records:
            if later and record is records[-1]:
                sized(theirs, later)
            progress.update(record)
    reader.join()
    os.close(ours)
    return received.decode()


def test_plain_lines_say_everything_once_and_in_words() -> None:
    values = {"staleness_mean": 1.25, "staleness_max": 2, "tokens_per_s": 12345.6, "samples_per_s": 700}
    (line,) = plain_lines([step(7, **values, engine_busy=0.914, trainer_busy=0.8)])
    assert line == (
        "step 7/100  reward 0.500  staleness 1.2, max 2 of 2  speed 12,346 tokens/s, 700 samples/s  "
        "busy engine 91%, trainer 80%  time 1 s"
    )


def test_a_step_in_a_swarm_says_what_came_of_its_peers() -> None:
    (line,) = plain_lines([step(1, peers=3, external=2, offers_shared=5)])
    assert "swarm 3 peers, 2 of their groups, 5 shared" in line


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
    assert lines[2] == "logprobs of engine and trainer differ by 1.5e-07 nats"
    assert lines[3:] == ["held-out after 1 steps: full marks sampled 0.500"]


def answer(number: int, said: str, reward: float | None = 1.0, **more: float | str) -> Record:
    given = {"task": "words", "question": "reverse river", "truth": "revir", "reason": "", **more}
    return {"kind": "answer", "step": 0, "time_s": 0.0, "number": number, "answer": said, "reward": reward, **given}


def test_answers_of_an_evaluation_are_read_beside_their_questions_and_rewards() -> None:
    control = "a\x1b[2Jb\n\u202e" + "c" * 100
    unscored = answer(2, "x", None, reason="scorer: failed: no\nbackend")
    lines = plain_lines([answer(0, "revir"), answer(1, control, 0.25), unscored])
    assert lines[0] == "  'reverse river' -> 'revir'  reward 1"
    assert lines[1].startswith(r"  'reverse river' -> 'a\x1b[2Jb\n\u202ec")
    assert lines[1].endswith("c...'  reward 0.25")
    assert lines[2:] == [r"  'reverse river' -> 'x'  not scored: scorer: failed: no\nbackend"]
    last = shown_on_a_terminal([answer(0, "ervir", 0.0), answer(0, "revir")]).rpartition("╭")[2]
    assert "'revir'" in last
    assert "ervir'" not in last.replace("'revir'", "")


def test_the_time_so_far_and_the_time_to_go_are_those_of_this_process_s_steps() -> None:
    """After a resume at step 50 the steps take 2 s each."""
    records: list[Record] = [{"kind": "step", "step": n, "time_s": 3000.0 + 2 * n} for n in (51, 52, 100)]
    times = [line.rpartition("  time ")[2] for line in plain_lines(records, every_s=0.0)]
    assert times == ["51:42 min", "51:44 min, about 1:36 min to go", "53:20 min"]


def test_a_start_names_what_it_is_doing() -> None:
    assert plain_lines([stage("starting the trainer")]) == ["starting the trainer"]
    last = shown_on_a_terminal([stage("starting the trainer")]).rpartition("╭")[2]
    assert "starting the trainer" in last
    assert "0 s" in last


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines() -> None:
    shown = shown_on_a_terminal([step(1), step(100)], TERM="dumb")
    assert [line.split()[1] for line in shown.splitlines()] == ["1/100", "100/100"]
    assert "\x1b" not in shown


def test_a_terminal_without_colours_gets_none_and_a_narrow_one_no_line_that_is_too_long() -> None:
    records: list[Record] = [answer(0, "c" * 300), step(3, staleness_max=2, tokens_per_s=12345.6)]
    colours = re.compile(r"\x1b\[(?:[39][0-7]|[34]8;)[\d;]*m")
    assert colours.search(shown_on_a_terminal(records))
    narrow = shown_on_a_terminal(records, columns=44, NO_COLOR="1")
    assert not colours.search(narrow)
    lines = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", narrow.rpartition("╭")[2]).splitlines()
    assert max(map(len, lines)) <= 44


def test_a_panel_is_painted_on_a_clear_screen_when_the_terminal_s_size_has_changed() -> None:
    resized = shown_on_a_terminal([step(1), step(2)], columns=100, later=60)
    assert resized.count("\x1b[2J") == 1
    assert "2 of 100" in resized.rpartition("\x1b[2J")[2]
    assert "\x1b[2J" not in shown_on_a_terminal([step(1), step(2)], columns=100)


def test_mean_rewards_stand_before_full_marks_which_partial_credit_never_reaches() -> None:
    values = {"sampled": 0.0, "greedy": 0.0, "sampled_reward": 0.5, "greedy_reward": 0.625}
    (line,) = plain_lines([{"kind": "eval", "step": 4, "time_s": 0.0, **values}])
    assert line == (
        "held-out after 4 steps: reward sampled 0.500, greedy 0.625; full marks sampled 0.000, greedy 0.000"
    )


def test_a_warning_stands_between_two_rules_where_there_is_no_panel() -> None:
    record: Record = {"kind": "event", "name": "reward_collapsed", "time_s": 0.0, "reason": "set train.lr lower"}
    rule, warning, end = plain_lines([record])
    assert rule == end == "!" * 80
    assert warning == "WARNING: reward_collapsed: reason set train.lr lower"


def test_a_warning_stays_in_the_panel_when_other_events_come() -> None:
    why = "scorer: failed: mine:boom: ZeroDivisionError: division by zero (mine.py:2 in boom)"
    events: list[Record] = [
        {"kind": "event", "name": "rollout_failed", "time_s": 0.0, "reason": why},
        {"kind": "event", "name": "engine_lost", "time_s": 0.0, "reason": "http://127.0.0.1:1"},
    ]
    last = shown_on_a_terminal(events).rpartition("╭")[2]
    assert "engine_lost" in last
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
