"""Chart data of runs: numbers as lines over the steps, for `shoal view` and reports."""

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from shoal.observe.names import EVAL_NAMES, LABELS, STEP_NAMES, Chart, Line
from shoal.observe.runs import RunRecords, column, mean, tasks_of

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
