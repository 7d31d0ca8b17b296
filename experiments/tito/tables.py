"""From runs to tables and a plot."""

import json
from pathlib import Path
from statistics import fmean

import matplotlib

from experiments.grid import Record, markdown

matplotlib.use("Agg")
from matplotlib import pyplot

LAST = 10
SHOWN = ("misaligned", "far", "log_ratio", "ess")


def write_results(folder: Path, records: list[Record]) -> None:
    """results.json, results.md and reward.png."""
    rows = [_row(group) for group in _groups(records)]
    (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    head = ["turns end in, merges, path", "misaligned", "ratio off by over 10 %", "mean abs log ratio",
            "effective samples", "reward at first", "reward at last (each seed)"]  # fmt: skip
    lines = [
        [
            f"{row['boundary']}, {row['merges']}, {row['path']}",
            *(_percent(row[name]) for name in ("misaligned", "far")),
            f"{row['log_ratio']:.2g}",
            f"{row['ess']:.2f}",
            f"{row['first']:.2f}",
            f"{row['last']:.2f} ({', '.join(f'{one:.2f}' for one in row['lasts'])})",  # type: ignore[attr-defined]
        ]
        for row in rows
    ]
    (folder / "results.md").write_text(markdown(head, lines))
    _plot(folder / "reward.png", _groups(records))


def _groups(records: list[Record]) -> list[list[Record]]:
    """The runs that differ only in their seed."""
    keys = list(dict.fromkeys((r["boundary"], r["merges"], r["path"]) for r in records))
    return [[r for r in records if (r["boundary"], r["merges"], r["path"]) == key] for key in keys]


def _row(group: list[Record]) -> dict[str, object]:
    lasts = [fmean(record["reward"][-LAST:]) for record in group]
    return {
        **{name: group[0][name] for name in ("boundary", "merges", "path")},
        **{name: fmean(record[name] for record in group) for name in SHOWN},
        "first": fmean(record["reward"][0] for record in group),
        "last": fmean(lasts),
        "lasts": lasts,
    }


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.{'0f' if share > 0.1 else '2g'}} %"


def _plot(path: Path, groups: list[list[Record]]) -> None:
    panels = list(dict.fromkeys((group[0]["boundary"], group[0]["merges"]) for group in groups))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.2), sharey=True, squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for group in groups:
            if (group[0]["boundary"], group[0]["merges"]) == panel:
                curves = [record["reward"] for record in group]
                axis.plot([fmean(values) for values in zip(*curves, strict=True)], label=group[0]["path"])
        axis.set(title=f"{panel[0]}, {panel[1]} merges", xlabel="step")
    axes[0][0].set_ylabel("reward")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
