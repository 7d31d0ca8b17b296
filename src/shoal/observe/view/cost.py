"""Cost of runs: hours of cores and GPUs, tokens, a price if one is given, each per point of held-out reward too."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from shoal.observe.metrics import Record, RunRecords, column, known, number

HOUR_S = 3600
PER_POINT = {"core-hours": ".3g", "GPU-hours": ".3g", "tokens trained on": ",.0f", "price": ".3g"}
"""Figures that are also shown per point of held-out reward, and their forms."""


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices of an hour, in any currency; None leaves a price out."""

    run: str = ""
    core_hour: float | None = None
    gpu_hour: float | None = None


LEAST_CENT = 0.01
"""Lowest price that two digits after the point can show."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Expenses of one run so far. Hours are wall-clock hours of the machine's cores and of the run's GPUs."""

    run: str
    rows: list[tuple[str, str]]
    """Label and figure of each number, those per point of held-out reward last."""


def cost(name: str, run: RunRecords, prices: Prices) -> Cost:
    """Cost of a run so far, in all its processes."""
    wall_s = max((number(record, "time_s", 0.0) for record in (*run.steps, *run.evals)), default=0.0)
    machine: Record = next((event for event in reversed(run.events) if event.get("name") == "machine"), {})
    cores, gpus = (known([number(machine, part) * wall_s / HOUR_S]) for part in ("cores", "gpus"))
    parts = ((cores, prices.core_hour), (gpus, prices.gpu_hour))
    priced = [value * price for hours, price in parts if price is not None for value in hours]
    price = sum(priced) if priced else None
    rewards = known(column(run.evals, "sampled_reward"))
    points = 100 * (rewards[-1] - rewards[0]) if len(rewards) > 1 else None
    rates = {name: _weighed(run, name) for name in ("engine_busy", "trainer_busy", "tokens_per_s")}
    each = {
        "core-hours": (next(iter(cores), None), ".3g"),
        "GPU-hours": (next(iter(gpus), None), ".3g"),
        "hours the engine computed": (rates["engine_busy"] / HOUR_S, ".3g"),
        "hours the trainer computed": (rates["trainer_busy"] / HOUR_S, ".3g"),
        "tokens trained on": (rates["tokens_per_s"], ",.0f"),
        "tokens of dropped groups": (run.total("wasted_tokens"), ",.0f"),
        "price": (price, ",.2f" if price is None or price >= LEAST_CENT else ".2g"),
        "points of held-out reward": (points, "+.1f"),
    }
    rows = [(label, "unknown" if value is None else format(value, form)) for label, (value, form) in each.items()]
    for label, form in PER_POINT.items():
        value, per_point = each[label][0], "none gained"
        if points is not None and points > 0:
            per_point = "unknown" if value is None else format(value / points, form)
        rows.append((f"{label} per point", per_point))
    return Cost(name, rows)


def costs(runs: Mapping[str, RunRecords], prices: Prices) -> list[Cost]:
    """The cost of each run."""
    return [cost(name, run, prices) for name, run in runs.items()]


def _weighed(run: RunRecords, name: str) -> float:
    """Sum of rates times their seconds; missing values count as 0."""
    return math.fsum(known(value * took for value, took in zip(run.column(name), run.seconds(), strict=True)))
