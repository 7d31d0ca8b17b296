"""Live progress shows a run's state: a panel that stays in place on a terminal, plain lines elsewhere.

`LiveProgress.update` is a listener of `metrics.Trackers`, so the panel shows what metrics.jsonl records. All output
goes to standard error: standard output is for results.
"""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self, TextIO

from shoal.observe.metrics import WARNINGS, Record, RunRecords, number

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shoal.observe.panel import ResizableLive


LABEL_COLUMNS = 32
"""Columns of a line that its label and its reward take."""


@dataclass(frozen=True, slots=True)
class AnswerChange:
    """One question, and its answers at the first and at the last evaluation."""

    question: str
    truth: str
    before: Record
    after: Record


def changes(run: RunRecords) -> list[AnswerChange]:
    """Questions answered at both the first and the last evaluation; empty before the second evaluation."""
    steps = [number(one, "step") for one in run.answers]
    if not steps or steps[0] == steps[-1]:
        return []
    first, last = (
        {number(one, "number"): one for one, step in zip(run.answers, steps, strict=True) if step == end}
        for end in (steps[0], steps[-1])
    )
    both = [n for n in first if n in last]
    return [AnswerChange(str(first[n]["question"]), str(first[n]["truth"] or ""), first[n], last[n]) for n in both]


def change_lines(run: RunRecords, width: int) -> Iterator[str]:
    """Lines of at most `width` columns that show each question with its two answers; none before training."""
    for one in changes(run):
        right = f"  right: {quoted(one.truth, width // 2 - 8)}" if one.truth else ""
        yield quoted(one.question, width - len(right)) + right
        for label, record in (("before", one.before), ("after", one.after)):
            yield f"  {label:<6}  {quoted(str(record['answer']), max(8, width - LABEL_COLUMNS))}  {reward_text(record)}"


def quoted(text: str, most: int) -> str:
    """Quotes text on one line of at most `most` characters, without control characters.

    >>> quoted("a\\nlong text", 10)
    "'a\\\\nlo...'"
    """
    shown = repr(text)
    return shown if len(shown) <= most else f"{shown[: max(1, most - 4)]}...{shown[0]}"


def reward_text(record: Record) -> str:
    """Formats the reward of an answer, or the reason why it was not scored."""
    value = record.get("reward")
    return (
        f"reward {value:.3g}" if isinstance(value, int | float) else f"not scored: {repr(record.get('reason'))[1:-1]}"
    )


BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 40
RULE = "!" * 80
SWARM_TEXTS = {"peers": "peers, ", "external": "of their groups, ", "offers_shared": "shared"}
"""Words after numbers of a step in a swarm."""


def sparkline(values: Iterable[float], width: int = SPARKLINE_WIDTH) -> str:
    """Draws values as bars of eight heights from smallest to largest; each bar is the mean of its share of them.

    >>> sparkline([0.0, 0.25, 0.5, 1.0])
    '▁▃▅█'
    >>> sparkline([3.0, 3.0])
    '▄▄'
    """
    known = [value for value in values if math.isfinite(value)]
    count = min(width, len(known))
    cuts = [len(known) * i // count for i in range(count + 1)] if count else [0]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    if low == high:
        return BARS[3] * count
    return "".join(BARS[min(int((mean - low) / (high - low) * len(BARS)), len(BARS) - 1)] for mean in means)


class LiveProgress:
    """Display of a run, used as a context manager; a terminal shows each update at once.

    Elsewhere, and on a terminal that cannot move its cursor (TERM=dumb), a step prints a line only when `every_s`
    seconds have passed since the last line. Evaluations, answers, events and the last step always print. The panel
    shows the staleness with its bound `max_staleness`.
    """

    def __init__(
        self,
        steps: int,
        max_staleness: int,
        *,
        stream: TextIO | None = None,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._max_staleness = max_staleness
        self._stream = stream or sys.stderr
        self._every_s = every_s
        self._clock = clock
        self._next_line_s = -math.inf
        self._step: Record = {}
        self._first_eval: Record = {}
        self._last_eval: Record = {}
        self._answers: dict[float, Record] = {}
        self._event = "starting"
        self._seen_s = 0.0  # when the newest step was recorded, or the display began
        self._first_step: Record = {}  # of this process
        self._warning = ""
        self._rewards: deque[float] = deque(maxlen=4096)
        self._live: ResizableLive | None = None

    def __enter__(self) -> Self:
        if self._stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
            from shoal.observe.panel import ResizableLive  # rich takes 60 ms, and only a terminal needs it

            self._seen_s = self._clock()
            self._live = ResizableLive(self._stream, self._panel)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, record: Record) -> None:
        """Takes one record of metrics.jsonl."""
        kind = record["kind"]
        if kind == "step":
            self._step = record
            self._rewards.append(number(record, "reward"))
            self._first_step, self._seen_s = self._first_step or record, self._clock()
            texts = [f"{name} {text}" for name, text in self._step_texts().items()]
            line = "  ".join([f"step {_form(record, 'step', '.0f')}/{self._steps}", *texts])
        elif kind == "eval":
            self._last_eval = record
            self._first_eval = self._first_eval or record
            line = f"held-out after {_form(record, 'step', '.0f')} steps: {_eval_text(record)}"
        elif kind == "answer":
            self._answers[number(record, "number")] = record
            line = f"  {_answer_text(record)}"
        else:
            line = self._event = event_text(record)
            if record.get("name") in WARNINGS:
                self._warning, line = line, f"{RULE}\nWARNING: {line}\n{RULE}"
        if self._live is not None:
            self._live.refresh()
        elif kind != "step" or self._is_due(record):
            print(line, file=self._stream, flush=True)

    def _is_due(self, step: Record) -> bool:
        """Whether to print a line for a step; if so, the next one is due after `every_s`."""
        due = self._seen_s >= self._next_line_s or step.get("step") == self._steps
        self._next_line_s = self._seen_s + self._every_s if due else self._next_line_s
        return due

    def _step_texts(self) -> Mapping[str, str]:
        """Texts of the newest step, by subject."""
        step = self._step
        mean, highest = _form(step, "staleness_mean", ".1f"), _form(step, "staleness_max", ".0f")
        tokens, samples = _form(step, "tokens_per_s", ",.0f"), _form(step, "samples_per_s", ",.0f")
        swarm = "".join(f"{_form(step, name, '.0f')} {what}" for name, what in SWARM_TEXTS.items() if "peers" in step)
        return {
            "reward": _form(step, "reward", ".3f"),
            **({"swarm": swarm} if swarm else {}),
            "staleness": f"{mean}, max {highest} of {self._max_staleness}",
            "speed": f"{tokens} tokens/s, {samples} samples/s",
            "busy": f"engine {_form(step, 'engine_busy', '.0%')}, trainer {_form(step, 'trainer_busy', '.0%')}",
            "time": self._time_text(),
        }

    def _time_text(self) -> str:
        """Formats the run's time so far and, after two steps of this process, the estimated time left."""
        (first, first_s), (done, done_s) = (
            (number(one, "step", 0.0), number(one, "time_s", 0.0)) for one in (self._first_step, self._step)
        )
        waited_s = self._clock() - self._seen_s if self._live else 0.0
        elapsed = duration(done_s + waited_s)
        if done <= first or done >= self._steps:
            return elapsed
        left_s = (done_s - first_s) / (done - first) * (self._steps - done) - waited_s
        return f"{elapsed}, about {duration(left_s)} to go"

    def _panel(self) -> "RenderableType":
        """Panel of the newest records."""
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done = max(0, int(number(self._step, "step", 0.0)))
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="ellipsis")
        rows.add_row("step", f"{done} of {self._steps}")
        rows.add_row("", ProgressBar(total=self._steps, completed=done, width=SPARKLINE_WIDTH))
        if self._step:
            texts = dict(self._step_texts())
            reward = Text(texts.pop("reward"), style="bold")
            rows.add_row("reward", reward.append(f"  {sparkline(self._rewards)}", style="not bold cyan"))
            for name, text in texts.items():
                rows.add_row(name, Text(text))
        if self._last_eval:
            rows.add_row("held-out", Text(_eval_text(self._last_eval, since=self._first_eval)))
        for place in sorted(self._answers):
            answer = Text(_answer_text(self._answers[place]), no_wrap=True, overflow="ellipsis")
            rows.add_row("" if place else "answers", answer)
        if not self._step:
            rows.add_row("time", duration(self._clock() - self._seen_s))
        if self._warning:
            rows.add_row("warning", Text(self._warning, style="bold yellow"))
        rows.add_row("last event", Text(self._event))
        return Panel(rows, title="Shoal", title_align="left", expand=False, padding=(0, 1))


def duration(seconds: float) -> str:
    """Formats a time for people.

    >>> duration(7.2), duration(83), duration(7384)
    ('7 s', '1:23 min', '2:03 h')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"


def _answer_text(record: Record) -> str:
    """Formats a question with its sampled answer and reward on one line."""
    question, answer = (quoted(str(record.get(name)), most) for name, most in (("question", 60), ("answer", 50)))
    return f"{question} -> {answer}  {reward_text(record)}"


def _form(record: Record, name: str, form: str) -> str:
    """Formats a number of the record; a missing number is a dash."""
    value = number(record, name)
    return format(value, form) if math.isfinite(value) else "-"


def _eval_text(record: Record, since: Record | None = None) -> str:
    """Formats mean rewards, then shares of right answers, each after its value in `since`, an earlier evaluation."""
    since = None if since is record else since

    def scores(suffix: str) -> str:
        """Scores of one kind, those that were measured."""
        known = [(how, how + suffix) for how in ("sampled", "greedy") if record.get(how + suffix) is not None]
        before = {name: f"{_form(since, name, '.3f')} → " for _, name in known} if since else {}
        return ", ".join(f"{how} {before.get(name, '')}{_form(record, name, '.3f')}" for how, name in known)

    kinds = {"reward": scores("_reward"), "full marks": scores("")}
    return "; ".join(f"{kind} {text}" for kind, text in kinds.items() if text)


def event_text(record: Record) -> str:
    """Formats an event: its name, then its details; of the check at the start, what it found."""
    if record.get("name") == "parity" and isinstance(mismatch := record.get("mismatch"), float):
        return f"logprobs of engine and trainer differ by {mismatch:.2g} nats"
    details = [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in record.items()
        if name not in {"kind", "name", "time_s"} and value is not None
    ]
    return ": ".join(filter(None, [str(record.get("name", "")), ", ".join(details)]))
