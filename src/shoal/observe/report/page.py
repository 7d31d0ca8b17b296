"""The page of a run is one HTML file that needs no other file and no network."""

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape

from shoal.experience import TaskCounts
from shoal.observe.report.figure import subtitle
from shoal.observe.report.records import EDGE_SHARE, RunRecords, mean

MEANINGS: Mapping[str, tuple[str, str]] = {
    "steps": ("Training steps", "{:.0f}"),
    "version": ("Version of the weights at the end", "{:.0f}"),
    "wall_s": ("Time of the run, s", "{:.1f}"),
    "reward_first": ("Reward, mean of the first tenth of the steps", "{:.3f}"),
    "reward_last": ("Reward, mean of the last tenth of the steps", "{:.3f}"),
    "eval_reward_before": ("Held-out reward, sampled, mean, first", "{:.3f}"),
    "eval_reward_after": ("Held-out reward, sampled, mean, last", "{:.3f}"),
    "accuracy_before": ("Held-out full marks, sampled, first", "{:.3f}"),
    "accuracy_after": ("Held-out full marks, sampled, last", "{:.3f}"),
    "greedy_before": ("Held-out full marks, greedy, first", "{:.3f}"),
    "greedy_after": ("Held-out full marks, greedy, last", "{:.3f}"),
    "staleness_mean": ("Staleness, mean, versions", "{:.2f}"),
    "staleness_max": ("Staleness, maximum, versions", "{:.0f}"),
    "ess": ("Effective sample size, mean share of the trained tokens", "{:.0%}"),
    "clipped_share": ("Tokens whose gradient the clip removed, mean", "{:.1%}"),
    "masked_share": ("Tokens whose gradient a bound on the weight removed, mean", "{:.1%}"),
    "entropy": ("Entropy, mean, nats per token", "{:.3f}"),
    "mismatch_fresh": ("Logprob difference of engine and trainer, same weights, mean, nats", "{:.1e}"),
    "tokens_per_s": ("Tokens per second, mean", "{:,.0f}"),
    "samples_per_s": ("Samples per second, mean", "{:,.1f}"),
    "engine_busy": ("Engine busy, mean", "{:.0%}"),
    "trainer_busy": ("Trainer busy, mean", "{:.0%}"),
    "dropped_late": ("Groups dropped because they came too late", "{:.0f}"),
    "late_tokens": ("Tokens masked because they were too old", "{:,.0f}"),
    "wasted_tokens": ("Tokens of groups that were dropped", "{:,.0f}"),
    "failed": ("Groups failed", "{:.0f}"),
}
# No script, no request: a report may be opened from anywhere, whatever a task's name or an event contains.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1c2733; background: #f5f7f9; margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 1.9rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .7rem; }
.lead { color: #66727f; margin: .3rem 0 1.6rem; overflow-wrap: anywhere; }
img, table, pre { background: #fff; border: 1px solid #e0e5ea; border-radius: 10px; box-sizing: border-box; }
img { width: 100%; height: auto; display: block; padding: .6rem; }
table { border-collapse: separate; border-spacing: 0; min-width: 24rem; }
td, th { padding: .35rem 1rem; overflow-wrap: anywhere; text-align: left; }
th { color: #66727f; font-weight: 500; }
tr + tr td { border-top: 1px solid #eef1f4; }
td + td, th + th { text-align: right; font-variant-numeric: tabular-nums; }
table.events td { text-align: left; }
pre { padding: 1rem 1.2rem; overflow: auto; font: 13px/1.5 ui-monospace, monospace; }
.columns { display: flex; flex-wrap: wrap; gap: 0 2.5rem; }
"""


def page_html(run: RunRecords, png: bytes, counts: Mapping[str, TaskCounts]) -> str:
    """Builds the whole page; every text of the run is escaped."""
    figures = run.summary() if run.steps or run.evals else {}
    summary = [(label, form.format(figures[name])) for name, (label, form) in MEANINGS.items() if name in figures]
    events = [_event_row(event) for event in run.events]
    picture = base64.b64encode(png).decode()
    tables = "".join(
        _section(title, body)
        for title, body in (
            ("Summary", _table(summary)),
            ("Groups in the log", _count_table(counts)),
            ("Cost of staleness", _late_table(run)),
            ("Importance ratio of the trained tokens", _ratio_table(run)),
            ("Staleness of the consumed groups", _staleness_table(run)),
        )
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(run.name)} - Shoal</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(run.name)}</h1>
<p class="lead">{escape(_first_sentence(run, figures))}</p>
<img alt="{escape(_first_sentence(run, figures))}" src="data:image/png;base64,{picture}">
<div class="columns">{tables}</div>
{_section("What happened", _table(events, kind="events"))}
{_section("Configuration", f"<pre>{escape(run.config_text)}</pre>" if run.config_text else "")}
</main>
</body>
</html>
"""


def _first_sentence(run: RunRecords, figures: Mapping[str, float]) -> str:
    """Sums the run up, as far as it got."""
    if not run.steps:
        return "This run has not finished a training step yet, so there is nothing to draw. " + _score(figures)
    return f"{subtitle(run)}. {_score(figures)}"


def _score(figures: Mapping[str, float]) -> str:
    parts = [
        f"held-out {what} {figures[before]:.2f} at first, {figures[after]:.2f} at last"
        for what, before, after in (
            ("reward (sampled)", "eval_reward_before", "eval_reward_after"),
            ("full marks (sampled)", "accuracy_before", "accuracy_after"),
            ("full marks (greedy)", "greedy_before", "greedy_after"),
        )
        if {before, after} <= figures.keys()
    ]
    return f"{'; '.join(parts)}.".capitalize() if parts else ""


def _event_row(event: Mapping[str, float | str | None]) -> tuple[str, str]:
    time_s = event.get("time_s")
    at = f"{time_s:.1f} s" if isinstance(time_s, int | float) and math.isfinite(time_s) else ""
    details = [f"{name} {value}" for name, value in event.items() if name not in {"kind", "name", "time_s"}]
    return at, ": ".join(filter(None, [str(event.get("name", "")), ", ".join(details)]))


def _count_table(counts: Mapping[str, TaskCounts]) -> str:
    """Table of each task's groups by their end; empty without a log."""
    rows = [
        (
            *(name, task.started, task.consumed, task.waiting, task.failed.total(), task.dropped.total()),
            *(task.in_flight, task.external),
        )
        for name, task in sorted(counts.items())
    ]
    heads = ("Task", "Started", "Consumed", "Waiting", "Failed", "Dropped", "In flight", "Consumed of peers")
    return _table([tuple(f"{cell:,}" if isinstance(cell, int) else cell for cell in row) for row in rows], heads)


def _late_table(run: RunRecords) -> str:
    """Table of each task's losses by lateness; empty when nothing was late."""
    costs = ("dropped_late", "wasted_tokens", "late_tokens")
    names = sorted({name for cost in costs for name in run.tasks(cost) if run.total(f"{cost}/{name}")})
    rows = [(name, *(f"{run.total(f'{cost}/{name}'):,.0f}" for cost in costs)) for name in names]
    return _table(rows, ("Task", "Groups dropped late", "Tokens of dropped groups", "Tokens masked"))


def _ratio_table(run: RunRecords) -> str:
    """Table of pi_theta / pi_behav in the first and the last tenth of the steps, and over all."""
    edge = math.ceil(len(run.steps) * EDGE_SHARE)
    rows = []
    for name in sorted(run.tasks("ratio_share"), key=lambda name: float(name.partition("-")[0])):
        shares = run.column(f"ratio_share/{name}")
        rows.append(
            (name.replace("-", " to "), *(f"{mean(part):.1%}" for part in (shares[:edge], shares[-edge:], shares)))
        )
    return _table(rows, ("pi_theta / pi_behav", "First tenth", "Last tenth", "All"))


def _staleness_table(run: RunRecords) -> str:
    """Table of consumed groups by staleness."""
    versions = sorted(int(name) for name in run.tasks("staleness") if name.isdigit())
    return _table([(f"{k}", f"{run.total(f'staleness/{k}'):,.0f}") for k in versions], ("Versions", "Groups"))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>" if body else ""


def _table(rows: Sequence[tuple[str, ...]], heads: tuple[str, ...] = (), kind: str = "figures") -> str:
    """A table of escaped cells; empty without rows."""
    lines = [
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in (*((("th", heads),) if heads else ()), *(("td", row) for row in rows))
    ]
    return f'<table class="{kind}">{"".join(lines)}</table>' if rows else ""
