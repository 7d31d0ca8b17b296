"""Charts of a run as pictures, by matplotlib's Agg, and its overview as one HTML file that needs no network."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import cycle, zip_longest
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter

from shoal.experience.counts import TaskCounts
from shoal.observe.charts import CHARTS, Chart, drawn
from shoal.observe.metrics import Record, RunRecords, moving_average, number
from shoal.observe.progress import changes, event_text
from shoal.observe.status import figures, lead, warnings_of
from shoal.observe.view.prose import PAGES

INK, MUTED, GRID = "#1c2733", "#66727f", "#e6eaee"
IN_THE_DARK = {INK: "#e6ebf0", MUTED: "#9fabb6", GRID: "#35414d", "#b8c1ca": "#56626d", "#2563c9": "#6ea0f5"}
COLOURS = ("#2563c9", "#d9730d", "#2a8f5b", "#7a4fc0", "#c5373d", "#14909b")
STYLE = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#b8c1ca",
    "axes.labelcolor": MUTED,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
}
WINDOWS_PER_RUN = 12
MOST_NAMED = 8
COLUMNS = 3
# Margins, titles and labels have fixed places: text of the charts is measured once, and not again for its neighbours.
# That is half of the time that a run takes for its picture at its end.
BELOW_PT = -18
"""Place of a label under its axis."""
FEW_POINTS = 20
"""Lines of at most this many points have markers."""


def figure_png(run: RunRecords) -> bytes:
    """Plots the picture; returns PNG bytes, 2080 pixels wide."""
    charts = charts_of(run)
    rows = -(-len(charts) // COLUMNS) or 1
    height = 1 + 3.4 * rows
    with rc_context(STYLE):  # type: ignore[arg-type]  # its stub knows fixed keys only
        figure = Figure(figsize=(13, height), facecolor="white")
        figure.subplots_adjust(0.045, 0.6 / height, 0.99, 1 - 1.1 / height, wspace=0.17, hspace=0.4)
        figure.text(0.012, 1 - 0.35 / height, plain(run.name), size=15, weight="bold")
        figure.text(0.012, 1 - 0.6 / height, plain(subtitle(run)), size=10, color=MUTED)
        for axes, chart in zip_longest(figure.subplots(rows, COLUMNS, squeeze=False).flat, charts):
            if chart is None:
                axes.set_axis_off()
            else:
                _plot(axes, chart)
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=160)
    return data.getvalue()


def figures_svg(run: RunRecords) -> list[tuple[str, str, str]]:
    """Plots each chart apart; returns its title, and its SVG in light and in dark colours."""
    drawings = []
    with rc_context(STYLE):  # type: ignore[arg-type]  # its stub knows fixed keys only
        for chart in charts_of(run):
            figure = Figure(figsize=(4.8, 3.2), facecolor="none")
            axes = figure.add_axes((0.14, 0.16, 0.83, 0.74))
            axes.set_facecolor("none")
            _plot(axes, chart)
            data = io.BytesIO()
            figure.savefig(data, format="svg", metadata={"Date": None})
            light = dark = data.getvalue().decode()
            for colour, instead in IN_THE_DARK.items():
                dark = dark.replace(f": {colour}", f": {instead}")
            drawings.append((chart.title, light, dark))
    return drawings


def charts_of(run: RunRecords) -> list[Chart]:
    """The charts of a picture, with those of the swarm if the run had peers."""
    in_swarm = any("peers" in step for step in run.steps)
    return drawn((*CHARTS["overview"], *(CHARTS["swarm"] if in_swarm else ())), {run.name: run})


def _plot(axes: Axes, chart: Chart) -> None:
    """Plots each line as a moving average, with each step pale behind it; a logarithmic scale has no place for 0."""
    window = max(1, round(max(len(line.x) for line in chart.lines) / WINDOWS_PER_RUN))
    lines = [line for line in chart.lines if not chart.is_log or any(value and value > 0 for value in line.y)]
    for nth, (line, colour) in enumerate(zip(lines, cycle(COLOURS), strict=False)):
        values = [math.nan if value is None else value for value in line.y]
        if window > 1:
            axes.plot(line.x, values, color=colour, linewidth=0.8, alpha=0.2)
        label = plain(line.label) if nth < MOST_NAMED else "_"
        marker = "o" if len(line.x) <= FEW_POINTS else ""
        style = "-" if nth < len(COLOURS) else "--"
        (mean,) = axes.plot(line.x, moving_average(values, window), color=colour, linestyle=style, label=label)
        mean.set(marker=marker, markersize=4)
    if chart.is_log and lines:
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    elif axes.get_ylim()[0] > 0:
        axes.set_ylim(bottom=0)
    if chart.is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    label = "training step" + (f", mean of {window}" if window > 1 else "")
    place = axes.annotate(label, (0.5, 0), (0, BELOW_PT), "axes fraction", "offset points", ha="center", va="top")
    place.set_color(MUTED)
    axes.yaxis.set_label_coords(0, 0)
    axes.xaxis.set_label_coords(0, 0)
    axes.set_title(chart.title, y=1.0)
    if len(lines) > 1:
        axes.legend(ncols=2, columnspacing=1, handlelength=1.5)


def subtitle(run: RunRecords) -> str:
    """Names model and tasks of a run in one line."""
    steps, config = len(run.steps), run.config
    done = {0: "no step is finished yet", 1: "1 step"}.get(steps, f"{steps} steps")
    if config is None:
        return done
    tasks = ", ".join(task.name for task in config.tasks[:4]) + (", ..." if len(config.tasks) > 4 else "")
    return (
        f"{config.model.path} on {tasks}  |  {done} of {config.train.groups_per_step} groups x "
        f"{config.rollout.group_size} answers  |  {config.train.loss.name} loss  |  "
        f"max_staleness = {config.asynchrony.max_staleness}"
    )


def plain(text: str) -> str:
    """Escapes text for matplotlib, which reads dollar signs as a formula."""
    return text.replace("$", r"\$")


def page_html(
    run_dir: Path, run: RunRecords, drawings: Sequence[tuple[str, str, str]], counts: Mapping[str, TaskCounts]
) -> str:
    """Builds the page with charts (title, light SVG, dark SVG) and tables; every text of the run is escaped."""
    pictures = [
        (title, *(base64.b64encode(one.encode()).decode() for one in (light, dark))) for title, light, dark in drawings
    ]
    look = files("shoal.net").joinpath("look.css").read_text()
    look += files("shoal.observe.view").joinpath("static", "style.css").read_text()
    return PAGES.get_template("frozen.html").render(
        **_of(run),
        lead=lead(run_dir, run),
        subtitle=subtitle(run),
        warnings=warnings_of(run),
        pictures=pictures,
        counts=counts,
        events=[_event(event) for event in run.events],
        config_text=run.config_text,
        look=look,
    )


def result_html(run: RunRecords, png: bytes) -> str:
    """Builds a notebook's view of a finished run: the picture, the figures and the answers."""
    return PAGES.get_template("result.html").render(**_of(run), picture=base64.b64encode(png).decode())


def _of(run: RunRecords) -> dict[str, object]:
    found = changes(run)
    ends = [f"{number(one, 'step'):.0f}" for one in (found[0].before, found[0].after)] if found else []
    return {"name": run.name, "figures": figures(run), "answers": found, "ends": ends}


def _event(event: Record) -> tuple[str, str]:
    time_s = event.get("time_s")
    return f"{time_s:.1f} s" if isinstance(time_s, int | float) else "", event_text(event)
