"""Names of all numbers in metrics.jsonl with their help, and the charts that draw them, from names.toml."""

from collections.abc import Mapping, Sequence
from importlib.resources import files

import msgspec

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
