"""The page of a run is one HTML file that needs no other file and no network."""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import jinja2

from shoal.experience.counts import TaskCounts
from shoal.observe.answers import AnswerChange, changes, quoted, reward_text
from shoal.observe.metrics import Record, number
from shoal.observe.progress import event_text
from shoal.observe.report.figure import subtitle
from shoal.observe.runs import RunRecords, column, known, mean

MOST_SHOWN = 300
"""Characters of a question or an answer in a table."""
PAGES = jinja2.Environment(loader=jinja2.PackageLoader("shoal.observe.report"), autoescape=True)
HOW: Mapping[str, Callable[[RunRecords, str], float]] = {
    "first tenth": lambda run, name: mean(run.column(name)[: run.edge]),
    "last tenth": lambda run, name: mean(run.column(name)[len(run.steps) - run.edge :]),
    "first score": lambda run, name: next(iter(known(column(run.evals, name))), math.nan),
    "last score": lambda run, name: next(reversed(known(column(run.evals, name))), math.nan),
    "newest": lambda run, name: next(reversed(run.column(name)), math.nan),
    "highest": lambda run, name: max(known(column((*run.steps, *run.evals, *run.events), name)), default=math.nan),
    "mean": lambda run, name: mean(run.column(name)),
    "mean over time": lambda run, name: mean(run.column(name), run.seconds()),
    "sum": lambda run, name: run.total(name) if run.steps else math.nan,
}
SUMMARY: Mapping[str, tuple[str, str, str, str]] = {
    "steps": ("Training steps", "newest", "step", "{:.0f}"),
    "version": ("Version of the weights at the end", "newest", "version", "{:.0f}"),
    "wall_s": ("Time of the run, s", "highest", "time_s", "{:.1f}"),
    "reward_first": ("Reward, mean of the first tenth of the steps", "first tenth", "reward", "{:.3f}"),
    "reward_last": ("Reward, mean of the last tenth of the steps", "last tenth", "reward", "{:.3f}"),
    "eval_reward_before": ("Held-out reward, sampled, mean, first", "first score", "sampled_reward", "{:.3f}"),
    "eval_reward_after": ("Held-out reward, sampled, mean, last", "last score", "sampled_reward", "{:.3f}"),
    "accuracy_before": ("Held-out full marks, sampled, first", "first score", "sampled", "{:.3f}"),
    "accuracy_after": ("Held-out full marks, sampled, last", "last score", "sampled", "{:.3f}"),
    "greedy_before": ("Held-out full marks, greedy, first", "first score", "greedy", "{:.3f}"),
    "greedy_after": ("Held-out full marks, greedy, last", "last score", "greedy", "{:.3f}"),
    "staleness_mean": ("Staleness, mean, versions", "mean", "staleness_mean", "{:.2f}"),
    "staleness_max": ("Staleness, maximum, versions", "highest", "staleness_max", "{:.0f}"),
    "ess": ("Effective sample size, mean share of the trained tokens", "mean", "ess", "{:.0%}"),
    "clipped_share": ("Tokens whose gradient the clip removed, mean", "mean", "clipped_share", "{:.1%}"),
    "masked_share": ("Tokens whose gradient a bound removed, mean", "mean", "masked_share", "{:.1%}"),
    "entropy": ("Entropy, mean, nats per token", "mean", "entropy", "{:.3f}"),
    "mismatch_fresh": ("Mismatch of engine and trainer, mean, nats", "mean", "mismatch_fresh", "{:.1e}"),
    "tokens_per_s": ("Tokens per second, mean", "mean over time", "tokens_per_s", "{:,.0f}"),
    "samples_per_s": ("Samples per second, mean", "mean over time", "samples_per_s", "{:,.1f}"),
    "engine_busy": ("Engine busy, mean", "mean over time", "engine_busy", "{:.0%}"),
    "trainer_busy": ("Trainer busy, mean", "mean over time", "trainer_busy", "{:.0%}"),
    "dropped_late": ("Groups dropped because they came too late", "sum", "dropped_late", "{:.0f}"),
    "late_tokens": ("Tokens masked because they were too old", "sum", "late_tokens", "{:,.0f}"),
    "wasted_tokens": ("Tokens of groups that were dropped", "sum", "wasted_tokens", "{:,.0f}"),
    "failed": ("Groups failed", "sum", "failed", "{:.0f}"),
}
"""Label, way and name of the metric, and form of each figure."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts under their heads; it is left out without rows."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    is_text: bool = False
    """Whether the cells are texts rather than numbers."""


def summary(run: RunRecords) -> dict[str, float]:
    """Figures of the run, without those that cannot be computed."""
    figures = {name: HOW[how](run, metric) for name, (_, how, metric, _) in SUMMARY.items()}
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def page_html(run: RunRecords, drawings: Sequence[tuple[str, str, str]], counts: Mapping[str, TaskCounts]) -> str:
    """Builds the whole page of charts (title, light SVG, dark SVG) and tables; every text of the run is escaped."""
    nothing = "This run has not finished a training step yet, so there is nothing to draw."
    lead = f"{subtitle(run)}." if run.steps else nothing
    rows = [(SUMMARY[name][0], SUMMARY[name][3].format(value)) for name, value in summary(run).items()]
    tables = [
        Table("Summary", (), rows),
        _answers(run),
        _counts(counts),
        _lateness(run),
        _ratios(run),
        _staleness(run),
        Table("What happened", (), [_event(event) for event in run.events], is_text=True),
    ]
    pictures = [
        (title, *(base64.b64encode(one.encode()).decode() for one in (light, dark))) for title, light, dark in drawings
    ]
    look = files("shoal.net").joinpath("look.css").read_text()
    return PAGES.get_template("report.html").render(run=run, lead=lead, pictures=pictures, tables=tables, look=look)


def result_html(run: RunRecords, png: bytes) -> str:
    """Builds what a notebook shows of a finished run: the picture, the summary and the answers."""
    rows = [(SUMMARY[name][0], SUMMARY[name][3].format(value)) for name, value in summary(run).items()]
    picture = base64.b64encode(png).decode()
    tables = [_answers(run), Table("Summary", (), rows)]
    return PAGES.get_template("result.html").render(run=run, picture=picture, tables=tables)


def _answers(run: RunRecords) -> Table:
    """Held-out questions with their sampled answers before and after."""
    found = changes(run)
    heads = ("Question", "Truth", *(f"After {number(one, 'step'):.0f} steps" for one in _ends(found)))
    rows = [
        (
            quoted(one.question, MOST_SHOWN),
            quoted(one.truth, MOST_SHOWN) if one.truth else "",
            *(f"{quoted(str(end['answer']), MOST_SHOWN)}, {reward_text(end)}" for end in (one.before, one.after)),
        )
        for one in found
    ]
    return Table("Sampled answers to held-out questions", heads, rows, is_text=True)


def _ends(found: Sequence[AnswerChange]) -> tuple[Record, ...]:
    return (found[0].before, found[0].after) if found else ()


def _event(event: Record) -> tuple[str, str]:
    time_s = event.get("time_s")
    return f"{time_s:.1f} s" if isinstance(time_s, int | float) else "", event_text(event)


def _counts(counts: Mapping[str, TaskCounts]) -> Table:
    """Each task's groups by their end."""
    heads = ("Task", "Started", "Consumed", "Waiting", "Failed", "Dropped", "In flight", "Consumed of peers")
    rows = []
    for name, task in sorted(counts.items()):
        ended = (task.consumed, task.waiting, task.failed.total(), task.dropped.total(), task.in_flight)
        rows.append((name, *(f"{number:,}" for number in (task.started, *ended, task.external))))
    return Table("Groups in the log", heads, rows)


def _lateness(run: RunRecords) -> Table:
    """Each task's losses by lateness."""
    costs = ("dropped_late", "wasted_tokens", "late_tokens")
    names = sorted({name for cost in costs for name in run.tasks(cost) if run.total(f"{cost}/{name}")})
    rows = [(name, *(f"{run.total(f'{cost}/{name}'):,.0f}" for cost in costs)) for name in names]
    return Table(
        "Cost of staleness", ("Task", "Groups dropped late", "Tokens of dropped groups", "Tokens masked"), rows
    )


def _ratios(run: RunRecords) -> Table:
    """Shares of pi_theta / pi_behav in the first and the last tenth of the steps, and over all."""
    rows = []
    for name in sorted(run.tasks("ratio_share"), key=lambda name: float(name.partition("-")[0])):
        shares = [HOW[how](run, f"ratio_share/{name}") for how in ("first tenth", "last tenth", "mean")]
        rows.append((name.replace("-", " to "), *(f"{share:.1%}" for share in shares)))
    heads = ("pi_theta / pi_behav", "First tenth", "Last tenth", "All")
    return Table("Importance ratio of the trained tokens", heads, rows)


def _staleness(run: RunRecords) -> Table:
    versions = sorted(int(name) for name in run.tasks("staleness") if name.isdigit())
    rows = [(f"{k}", f"{run.total(f'staleness/{k}'):,.0f}") for k in versions]
    return Table("Staleness of the consumed groups", ("Versions", "Groups"), rows)
