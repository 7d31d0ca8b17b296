"""Cost of runs: hours of cores and GPUs, tokens, a price if one is given, each per point of held-out reward too."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from shoal.observe.metrics import Record, number
from shoal.observe.runs import RunRecords, known

HOUR_S = 3600


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
    core_hours: float | None
    """None if the run did not record how many cores its machine has."""
    gpu_hours: float | None
    engine_hours: float
    """Hours in which the engine computed."""
    trainer_hours: float
    tokens: float
    """Sampled tokens of the consumed rollouts."""
    wasted_tokens: float
    points: float | None
    """Points of 100 by which the held-out mean reward rose, sampled answers; None before the second evaluation."""
    price: float | None

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Label and figure of each number, those per point last."""
        each = (
            ("core-hours", self.core_hours, ".3g"),
            ("GPU-hours", self.gpu_hours, ".3g"),
            ("hours the engine computed", self.engine_hours, ".3g"),
            ("hours the trainer computed", self.trainer_hours, ".3g"),
            ("tokens trained on", self.tokens, ",.0f"),
            ("tokens of dropped groups", self.wasted_tokens, ",.0f"),
            ("price", self.price, ",.2f" if self.price is None or self.price >= LEAST_CENT else ".2g"),
            ("points of held-out reward", self.points, "+.1f"),
        )
        rows = [(label, "unknown" if value is None else format(value, form)) for label, value, form in each]
        gained = self.points if self.points and self.points > 0 else None
        for label, value, form in (each[0], each[1], each[4], each[6]):
            per_point = "none gained" if gained is None else "unknown"
            if gained is not None and value is not None:
                per_point = format(value / gained, ",.0f" if form == ",.0f" else ".3g")
            rows.append((f"{label} per point", per_point))
        return rows


def cost(name: str, run: RunRecords, prices: Prices) -> Cost:
    """Cost of a run so far, in all its processes."""
    seconds = run.seconds()
    wall_s = max((number(record, "time_s", 0.0) for record in (*run.steps, *run.evals)), default=0.0)
    machine: Record = next((event for event in reversed(run.events) if event.get("name") == "machine"), {})
    core_hours = _hours(machine, "cores", wall_s)
    gpu_hours = _hours(machine, "gpus", wall_s)
    parts = ((core_hours, prices.core_hour), (gpu_hours, prices.gpu_hour))
    priced = [hours * price for hours, price in parts if hours is not None and price is not None]
    return Cost(
        run=name,
        core_hours=core_hours,
        gpu_hours=gpu_hours,
        engine_hours=_weighed(run.column("engine_busy"), seconds) / HOUR_S,
        trainer_hours=_weighed(run.column("trainer_busy"), seconds) / HOUR_S,
        tokens=_weighed(run.column("tokens_per_s"), seconds),
        wasted_tokens=run.total("wasted_tokens"),
        points=_points(run),
        price=sum(priced) if priced else None,
    )


def costs(runs: Mapping[str, RunRecords], prices: Prices) -> list[Cost]:
    """The cost of each run."""
    return [cost(name, run, prices) for name, run in runs.items()]


def _hours(machine: Record, part: str, wall_s: float) -> float | None:
    count = number(machine, part)
    return None if math.isnan(count) else count * wall_s / HOUR_S


def _weighed(values: list[float], seconds: list[float]) -> float:
    """Sum of rates times their seconds; missing values count as 0."""
    return math.fsum(known(value * took for value, took in zip(values, seconds, strict=True)))


def _points(run: RunRecords) -> float | None:
    rewards = known(number(record, "sampled_reward") for record in run.evals)
    return 100 * (rewards[-1] - rewards[0]) if len(rewards) > 1 else None
