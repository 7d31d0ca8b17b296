"""Names of all numbers in metrics.jsonl with their help, and the charts that draw them on pages and in reports."""

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files

import msgspec
from msgspec.structs import replace

from shoal.observe.metrics import RunRecords, column, mean, tasks_of
from shoal.trainer.messages import STATS_MEANINGS


class MetricName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One name; the head of names.toml explains the fields."""

    means: str = ""
    label: str = ""


class Line(msgspec.Struct, frozen=True):
    """One line of a chart; `label` is its word in a legend, and `means` explains the number."""

    run: str
    name: str
    label: str
    means: str
    x: list[float]
    y: list[float | None]


class Chart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chart of named numbers over the steps or the evaluations. A name that ends with / is a prefix of names.

    `charts.drawn` fills `lines`.
    """

    title: str
    steps: tuple[str, ...] = ()
    evals: tuple[str, ...] = ()
    is_share: bool = False
    is_log: bool = False
    repeats: str = ""
    """Title of another chart; if that one has the same lines, this chart is left out."""
    lines: Sequence[Line] = ()


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    step: dict[str, MetricName]
    eval: dict[str, MetricName]
    answer: dict[str, MetricName]
    charts: dict[str, tuple[Chart, ...]]


_TABLE = msgspec.toml.decode(files("shoal.observe").joinpath("names.toml").read_bytes(), type=_Table)
STEP_NAMES: Mapping[str, str] = {name: one.means or STATS_MEANINGS[name] for name, one in _TABLE.step.items()}
EVAL_NAMES: Mapping[str, str] = {name: one.means for name, one in _TABLE.eval.items()}
ANSWER_NAMES: Mapping[str, str] = {name: one.means for name, one in _TABLE.answer.items()}
LABELS: Mapping[str, str] = {name: one.label for name, one in (_TABLE.step | _TABLE.eval).items() if one.label}
"""Words for numbers that share a chart with others."""
CHARTS: Mapping[str, Sequence[Chart]] = _TABLE.charts
"""Charts of each page."""


MOST_POINTS = 1000
"""Most points of a line; in longer runs each point is the mean of several steps."""
BOUNDED = "staleness_max"
"""Number that is drawn with its bound, `max_staleness`."""


def drawn(charts: Sequence[Chart], runs: Mapping[str, RunRecords]) -> list[Chart]:
    """The charts for which at least one run has numbers, without duplicates."""
    found = [
        replace(chart, lines=[line for name, run in runs.items() for line in _lines(chart, name, run)])
        for chart in charts
    ]
    curves = {chart.title: [(line.run, line.x, line.y) for line in chart.lines] for chart in found}
    return [
        chart for chart in found if not all(curve in curves.get(chart.repeats, ()) for curve in curves[chart.title])
    ]


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float | None]]:
    """At most `MOST_POINTS` points, each the mean of its neighbours; None where there is no number.

    >>> thinned([1, 2], [0.5, float("nan")])
    ([1, 2], [0.5, None])
    """
    span = -(-len(x) // MOST_POINTS) or 1
    starts = range(0, len(x), span)
    means = [mean(y[i : i + span]) for i in starts]
    return [x[min(i + span, len(x)) - 1] for i in starts], [round(v, 6) if math.isfinite(v) else None for v in means]


def _label(name: str) -> str:
    kind, _, of = name.partition("/")
    return of.replace("-", " to ") if kind == "ratio_share" else of or LABELS.get(name, name)


def _lines(chart: Chart, run_name: str, run: RunRecords) -> list[Line]:
    wanted = [(run.steps, name, STEP_NAMES) for name in chart.steps]
    wanted += [(run.evals, name, EVAL_NAMES) for name in chart.evals]
    lines, steps = [], dict[bool, list[float]]()
    for records, name, meanings in wanted:
        names = [name + task for task in tasks_of(records, name[:-1])] if name.endswith("/") else [name]
        meaning = next((said for known, said in meanings.items() if known.partition("<")[0] == name), "")
        for one in names:
            values = column(records, one)
            if any(map(math.isfinite, values)):
                if (of_steps := records is run.steps) not in steps:
                    steps[of_steps] = column(records, "step")
                lines.append(Line(run_name, one, _label(one), meaning, *thinned(steps[of_steps], values)))
    if run.config is not None and (bounded := next((line for line in lines if line.name == BOUNDED), None)):
        bound = float(run.config.asynchrony.max_staleness)
        ends = [bounded.x[0], bounded.x[-1]]
        lines.append(Line(run_name, "max_staleness", "bound", "Bound of the staleness.", ends, [bound, bound]))
    return lines
