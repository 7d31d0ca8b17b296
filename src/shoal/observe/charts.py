"""Chart data of runs: numbers as lines over the steps, for `shoal view` and reports."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.observe.metrics import EVAL_NAMES, STEP_NAMES
from shoal.observe.runs import RunRecords, column, mean, tasks_of

MOST_POINTS = 1000
"""Most points of a line; in longer runs each point is the mean of several steps."""
BOUNDED = "staleness_max"
"""Number that is drawn with its bound, `max_staleness`."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart; `label` is its word in a legend, and `means` explains the number."""

    run: str
    name: str
    label: str
    means: str
    x: list[float]
    y: list[float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of named numbers over the steps or the evaluations. A name that ends with / is a prefix of names.

    `drawn` fills `lines`.
    """

    title: str
    steps: tuple[str, ...] = ()
    evals: tuple[str, ...] = ()
    is_share: bool = False
    is_log: bool = False
    repeats: str = ""
    """Title of another chart; if that one has the same lines, this chart is left out."""
    lines: Sequence[Line] = ()


OVERVIEW = (
    Chart("Reward", ("reward",)),
    Chart("Held-out reward", evals=("sampled_reward", "greedy_reward")),
    Chart("Held-out full marks", evals=("sampled", "greedy", "pass_at_k"), is_share=True, repeats="Held-out reward"),
    Chart("Solved, by task", ("solve_rate/",), is_share=True, repeats="Reward"),
    Chart("Staleness, versions", ("staleness_mean", BOUNDED)),
    Chart("Tokens per second", ("tokens_per_s",)),
    Chart("Busy", ("engine_busy", "trainer_busy"), is_share=True),
    Chart("Importance ratios", ("ratio_share/",), is_share=True),
    Chart("Usable data", ("informative_share", "ess", "clipped_share", "masked_share"), is_share=True),
    Chart("Entropy, KL, gradient norm", ("entropy", "kl", "grad_norm"), is_log=True),
    Chart("Mismatch of engine and trainer, nats", ("mismatch_fresh", "mismatch")),
    Chart("Answer length, tokens", ("length_mean",)),
    Chart("Answers cut at max_tokens", ("cut_share",), is_share=True),
)
WAITS = (
    Chart("Busy", ("engine_busy", "trainer_busy"), is_share=True),
    Chart("Seconds of a step, one after the other", ("save_s", "groups_wait_s", "train_s", "write_s")),
    Chart("Held back by staleness", ("gate_closed",), is_share=True),
    Chart("Time to load a Version, s", ("load_s",)),
    Chart("Finished groups that wait for a step", ("waiting",)),
    Chart("Time to a group's rewards, s", ("scorer_p50_s", "scorer_p99_s")),
    Chart("Time a group waits for a reward worker, s", ("scorer_queue_p50_s", "scorer_queue_p99_s")),
    Chart("Tokens per second", ("tokens_per_s/",)),
    Chart("Tokens of groups that were dropped", ("wasted_tokens",)),
)
SWARM = (
    Chart("Offers", ("offers_shared", "offers_admitted", "offers_refused")),
    Chart("Peers' groups in a step", ("external", "external_missing")),
    Chart("Reward of own and of peers' answers", ("reward", "reward_external")),
    Chart("Peers remembered", ("peers",)),
)


LABELS = {
    "sampled_reward": "sampled",
    "greedy_reward": "greedy",
    "pass_at_k": "pass@k",
    "staleness_mean": "mean",
    "staleness_max": "oldest group",
    "engine_busy": "engine",
    "trainer_busy": "trainer",
    "informative_share": "groups whose rewards differ",
    "ess": "effective sample size",
    "clipped_share": "tokens clipped",
    "masked_share": "tokens masked",
    "kl": "KL",
    "grad_norm": "gradient norm",
    "mismatch_fresh": "newest weights",
    "mismatch": "all tokens",
    "save_s": "saves a checkpoint",
    "groups_wait_s": "waits for groups",
    "train_s": "trains",
    "write_s": "writes a Version",
    "scorer_p50_s": "median",
    "scorer_p99_s": "99th percentile",
    "scorer_queue_p50_s": "median",
    "scorer_queue_p99_s": "99th percentile",
    "offers_shared": "given",
    "offers_admitted": "admitted",
    "offers_refused": "refused",
    "external": "trained",
    "external_missing": "missing",
    "reward": "own",
    "reward_external": "peers'",
}
"""Words for numbers that share a chart with others; a number of a task, of bounds or of versions has theirs."""


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
