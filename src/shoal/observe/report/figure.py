"""The picture of a run has nine panels over the training steps, plotted with matplotlib's Agg."""

import io
import math
from collections.abc import Callable, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter
from matplotlib.transforms import ScaledTranslation

from shoal.observe.report.records import RunRecords, column, moving_average

INK, MUTED, GRID = "#1c2733", "#66727f", "#e6eaee"
BLUE, ORANGE, GREEN, PURPLE, RED, TEAL = "#2563c9", "#d9730d", "#2a8f5b", "#7a4fc0", "#c5373d", "#14909b"
TASK_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL)
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
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.1,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.3,
    "legend.labelspacing": 0.3,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}
WINDOWS_PER_RUN = 12
MOST_NAMED_TASKS = 5
LEGEND_CHARACTERS = 44
HEAD_POINTS = 31.0
LOSS_SIDE = (
    ("ratio_mean", "mean ratio", BLUE),
    ("entropy", "entropy", GREEN),
    ("grad_norm", "gradient norm", PURPLE),
    ("kl", "KL", TEAL),
    ("mismatch", "mismatch", ORANGE),
    ("mismatch_fresh", "fresh mismatch", RED),
)
SHARES = (
    ("ess", "effective sample size", BLUE),
    ("informative_share", "informative groups", GREEN),
    ("clipped_share", "clipped", ORANGE),
    ("masked_share", "masked", RED),
)
RATIO_COLOURS = ("#8c2d04", "#d9730d", "#f3c08a", "#dfe4e9", "#a9c4ee", "#5c8be0", "#2563c9", "#14325f")
"""Colours from far below 1 to far above; neighbours of 1 are pale."""


def figure_png(run: RunRecords) -> bytes:
    """Plots the picture; returns PNG bytes, 2080 x 1760 pixels."""
    with rc_context(STYLE):  # type: ignore[arg-type]  # its stub knows fixed keys only
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.06, rect=(0, 0, 1, 0.94))
        figure = Figure(figsize=(13, 11), layout=layout, facecolor="white")
        figure.text(0.012, 0.97, plain(run.name), size=15, weight="bold")
        figure.text(0.012, 0.947, plain(subtitle(run)), size=10, color=MUTED)
        panels: Sequence[Callable[[Axes, RunRecords], str]] = (
            plot_reward,
            plot_accuracy,
            plot_staleness,
            plot_throughput,
            plot_busy,
            plot_loss_side,
            plot_ratios,
            plot_staleness_histogram,
            plot_shares,
        )
        for axes, draw in zip(figure.subplots(3, 3).flat, panels, strict=True):
            _head(axes, draw(axes, run))
            axes.set_xlabel(axes.get_xlabel() or "training step")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=160)
    return data.getvalue()


def subtitle(run: RunRecords) -> str:
    """Names model and tasks of a run in one line."""
    steps = len(run.steps)
    done = f"{steps} steps" if steps != 1 else "1 step"
    if not steps:
        done = "no step is finished yet"
    if run.config is None:
        return done
    config = run.config
    tasks = ", ".join(task.name for task in config.tasks[:4]) + (", ..." if len(config.tasks) > 4 else "")
    return (
        f"{config.model.path} on {tasks}  |  {done} of {config.train.groups_per_step} groups x "
        f"{config.rollout.group_size} answers  |  {config.train.loss.name} loss  |  "
        f"max_staleness = {config.asynchrony.max_staleness}"
    )


def plain(text: str) -> str:
    """Escapes text for matplotlib, which reads dollar signs as a formula."""
    return text.replace("$", r"\$")


def plot_reward(axes: Axes, run: RunRecords) -> str:
    """Plots each task's mean reward, every step pale and the moving average strong; returns the panel's title."""
    tasks = run.tasks("reward")
    named = tasks[:MOST_NAMED_TASKS] if len(tasks) <= MOST_NAMED_TASKS else []
    for task, colour in zip(named, TASK_COLOURS, strict=False):
        _curve(axes, run, f"reward/{task}", task, colour)
    for task in () if named else tasks:
        label = f"each of {len(tasks)} tasks" if task == tasks[0] else "_"
        average = moving_average(run.column(f"reward/{task}"), _window(run))
        axes.plot(run.column("step"), average, color=MUTED, linewidth=0.8, alpha=0.45, label=label)
    if len(tasks) != 1:
        _curve(axes, run, "reward", "all tasks", INK)
    return "Reward" + (f", mean of {_window(run)} steps" if _window(run) > 1 else "")


def plot_accuracy(axes: Axes, run: RunRecords) -> str:
    """Plots mean reward and share of right answers on held-out questions, with first and last value as numbers."""
    steps = column(run.evals, "step")
    for name, label, colour, line, offset in (
        ("sampled_reward", "reward", ORANGE, "-", 7),
        ("sampled", "full marks", BLUE, "-", -14),
        ("greedy", "full marks, greedy", GREEN, "--", 7),
    ):
        points = [(x, y) for x, y in zip(steps, column(run.evals, name), strict=True) if math.isfinite(y)]
        if not points:
            continue
        axes.plot(*zip(*points, strict=True), line, marker="o", markersize=4, color=colour, label=label)
        for point in {points[0], points[-1]}:
            axes.annotate(
                f"{point[1]:.2f}", point, (0, offset), textcoords="offset points", ha="center", color=colour, size=9
            )
    axes.margins(x=0.08, y=0.18)
    return "Held-out score"


def plot_staleness(axes: Axes, run: RunRecords) -> str:
    """Plots mean and maximum staleness of the consumed groups against the bound."""
    highest = run.column("staleness_max")
    top = max(filter(math.isfinite, highest), default=0.0)
    if any(map(math.isfinite, highest)):
        axes.fill_between(
            run.column("step"), highest, step="mid", color=ORANGE, alpha=0.22, linewidth=0, label="maximum"
        )
    _curve(axes, run, "staleness_mean", "mean", BLUE)
    if axes.lines and run.config is not None:
        bound = run.config.asynchrony.max_staleness
        axes.axhline(bound, color=RED, linewidth=1.2, linestyle=(0, (5, 3)), label=f"max_staleness = {bound}")
        top = max(top, bound)
    axes.set_ylim(0, max(1.0, top * 1.15))
    return "Staleness of consumed groups, versions"


def plot_throughput(axes: Axes, run: RunRecords) -> str:
    """Plots tokens per second on the left scale, samples per second on the right."""
    right = axes.twinx()
    right.grid(visible=False)
    for side, name, label, colour, headroom in (
        (axes, "tokens_per_s", "tokens/s", BLUE, 1.1),
        (right, "samples_per_s", "samples/s", ORANGE, 1.8),
    ):
        _curve(side, run, name, "_", colour, over_time=True)
        # The two are proportional while lengths stay as they are: different headroom keeps the curves apart.
        side.set_ylim(0, side.get_ylim()[1] * headroom)
        side.set_ylabel(label, color=colour)
        side.tick_params(axis="y", colors=colour)
    if not right.lines:
        right.set_axis_off()
    return "Throughput"


def plot_busy(axes: Axes, run: RunRecords) -> str:
    """Plots the share of time that engine and trainer spent computing."""
    _curve(axes, run, "engine_busy", "engine", BLUE, over_time=True)
    _curve(axes, run, "trainer_busy", "trainer", ORANGE, over_time=True)
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return "Busy share"


def plot_loss_side(axes: Axes, run: RunRecords) -> str:
    """Plots the loss and its inputs on one logarithmic scale, which has no place for 0."""
    for name, label, colour in LOSS_SIDE:
        values = run.column(name)
        if any(value > 0 for value in values):
            _curve(axes, run, name, label, colour, positive_only=True)
        elif any(map(math.isfinite, values)):
            axes.plot([], [], color=colour, label=f"{label} (0)")
    if axes.lines:
        axes.set_yscale("log")
    return "Loss side, nats and shares"


def plot_ratios(axes: Axes, run: RunRecords) -> str:
    """Plots the distribution of pi_theta / pi_behav over the trained tokens, shares stacked."""
    bins = sorted(run.tasks("ratio_share"), key=lambda name: float(name.partition("-")[0]))
    if bins:
        shares = [moving_average(run.column(f"ratio_share/{name}"), _window(run)) for name in bins]
        labels = [name.replace("-inf", " and more") for name in bins]
        axes.stackplot(run.column("step"), shares, labels=labels, colors=RATIO_COLOURS)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return "Importance ratio of the trained tokens"


def plot_staleness_histogram(axes: Axes, run: RunRecords) -> str:
    """Plots the groups of the whole run by staleness."""
    versions = sorted(int(name) for name in run.tasks("staleness") if name.isdigit())
    counts = [sum(filter(math.isfinite, run.column(f"staleness/{k}"))) for k in versions]
    if versions:
        axes.bar(versions, counts, color=BLUE, width=0.8, label="consumed groups")
        axes.set_xlabel("versions")
    return "Staleness, whole run"


def plot_shares(axes: Axes, run: RunRecords) -> str:
    """Plots the share of the data that the update could use."""
    for name, label, colour in SHARES:
        _curve(axes, run, name, label, colour)
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return "Usable data, shares"


def _window(run: RunRecords) -> int:
    return max(1, round(len(run.steps) / WINDOWS_PER_RUN))


def _curve(
    axes: Axes,
    run: RunRecords,
    name: str,
    label: str,
    colour: str,
    *,
    over_time: bool = False,
    positive_only: bool = False,
) -> None:
    """Plots one name over the steps as a moving average, with each step pale behind it; a name without values is left
    out.

    `over_time` is for rates and shares of time: each step weighs as long as it took, and is not plotted by itself.
    """
    values = run.column(name)
    if positive_only:
        values = [value if value > 0 else math.nan for value in values]
    if not any(map(math.isfinite, values)):
        return
    steps, window = run.column("step"), _window(run)
    if not over_time and window > 1:
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.2)
    weights = run.seconds() if over_time else None
    marker = "o" if len(values) == 1 else ""
    axes.plot(steps, moving_average(values, window, weights), color=colour, marker=marker, label=plain(label))


def _head(axes: Axes, title: str) -> None:
    """Writes the title with the legend below it and above the curves, or that there is nothing yet."""
    axes.set_title(title, pad=HEAD_POINTS)
    _, labels = axes.get_legend_handles_labels()
    if labels:
        below_title = axes.transAxes + ScaledTranslation(0, HEAD_POINTS / 72, axes.figure.dpi_scale_trans)
        columns = 4 if sum(map(len, labels)) < LEGEND_CHARACTERS or len(labels) > 6 else 3
        legend = axes.legend(
            loc="upper left", bbox_to_anchor=(-0.02, 1), bbox_transform=below_title, borderpad=0.1, ncols=columns
        )
        legend.set_in_layout(False)
    elif not axes.lines and not axes.patches:
        axes.text(0.5, 0.5, "nothing recorded yet", transform=axes.transAxes, ha="center", color=MUTED)
