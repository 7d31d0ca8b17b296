"""Waits of a run: the bottleneck in one sentence with the setting that moves it, and bars of the newest steps.

The trainer's bars are measured in sequence. The other lanes have only a share or a duration per step; their bars begin
with the step.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from shoal.observe.metrics import Record, RunRecords, known, number
from shoal.observe.status import LATELY, lately

BUSY = 0.8
"""A side that is busy for at least this share of the time counts as not waiting."""
SLOW = 0.2
"""Waits that take at least this share of the time are reported."""


def bottleneck(run: RunRecords) -> str:
    """The sentence, from the last steps; without numbers it says so."""
    engine, trainer = lately(run, "engine_busy"), lately(run, "trainer_busy")
    if engine is None or trainer is None:
        return "No step has said yet how busy engine and trainer were."
    over = f"over the last {min(LATELY, len(run.steps))} steps"
    figures = f"({over}: engine busy {engine:.0%} of the time, trainer {trainer:.0%})"
    config = run.config
    if engine >= BUSY and trainer >= BUSY:
        return f"Neither side waits much {figures}: only more or faster hardware makes this run quicker."
    if config is not None and config.asynchrony.max_staleness == 0:
        return (
            f"Engine and trainer take turns {figures}: asynchrony.max_staleness is 0, so each waits for the other; "
            "1 or more lets them work at once."
        )
    if max(engine, trainer) < BUSY / 2:
        return f"Both sides wait for something else {figures}: {_scorer(run)}."
    if engine >= trainer:
        now = "" if config is None else f", now {config.engine.max_running}"
        waited = _share(run, "groups_wait_s")
        return (
            f"Generation is the slower side {figures}: the trainer waits for groups {waited:.0%} of the time. "
            f"More engines (engine.count, engine.urls), engine.max_running{now}, or shorter answers move it."
        )
    return (
        f"Training is the slower side {figures}: the engine stands still {1 - engine:.0%} of the time. "
        "train.ranks or a larger train.tokens_per_microbatch move it; asynchrony.max_staleness does not."
    )


def other_waits(run: RunRecords) -> list[str]:
    """Sentences about other long waits, each with the setting that moves it."""
    config = run.config
    each = (
        (_share(run, "save_s"), "for checkpoints; checkpoint.every_steps moves it"),
        (_share(run, "write_s"), "for Versions to be written; train.push_every moves it"),
    )
    found = [f"The trainer waits {share:.0%} of the time {what}." for share, what in each if share >= SLOW]
    closed = lately(run, "gate_closed")
    if closed is not None and closed >= SLOW and config is not None:
        found.append(
            f"Admission was held back by staleness {closed:.0%} of the time: asynchrony.max_staleness is "
            f"{config.asynchrony.max_staleness}, and a larger one lets more answers start."
        )
    return found


def _share(run: RunRecords, name: str) -> float:
    """Seconds under a name over all seconds of the last steps; 0 without numbers."""
    total = math.fsum(run.seconds()[-LATELY:])
    return math.fsum(known(run.column(name)[-LATELY:])) / total if total else 0.0


def _scorer(run: RunRecords) -> str:
    queued, took = lately(run, "scorer_queue_p50_s"), lately(run, "scorer_p50_s")
    if took is None or math.isnan(took):
        return "agents and tools, or the reward, are the likely ones"
    if queued is not None and queued > took / 2:
        return f"half of the groups wait {queued:.2g} s or more for a reward worker; reward.workers moves it"
    return f"a group's rewards take {took:.2g} s in the median; agents, tools or slow rewards are the likely ones"


MOST_STEPS = 40
TRAINER, ENGINE, GATE, REWARDS, PUSH = "trainer", "engine", "admission", "rewards", "push"
OF_THE_TRAINER = (
    ("save_s", "saves a checkpoint"),
    ("groups_wait_s", "waits for groups"),
    ("train_s", "trains"),
    ("write_s", "writes a Version"),
)


@dataclass(frozen=True, slots=True)
class Bar:
    """One stretch of one lane, in seconds of the run."""

    lane: str
    does: str
    start_s: float
    took_s: float
    step: int
    is_wait: bool


def timeline(run: RunRecords) -> list[Bar]:
    """Bars of the newest steps; empty for a run that measured none."""
    return [bar for before, step in pairwise(run.steps[-MOST_STEPS - 1 :]) for bar in bars_of(before, step)]


def bars_of(before: Record, step: Record) -> list[Bar]:
    """Bars of one step, given the record of the step before it."""
    start_s, end_s = number(before, "time_s"), number(step, "time_s")
    if not end_s > start_s or "train_s" not in step:
        return []  # the clock of another process, or a run of an earlier Shoal
    return _of_trainer(step, start_s, end_s) + _of_others(step, start_s, end_s - start_s)


def _of_trainer(step: Record, start_s: float, end_s: float) -> list[Bar]:
    bars = []
    at_s = start_s
    for name, does in OF_THE_TRAINER:
        took_s = min(number(step, name, 0.0), end_s - at_s)
        if took_s > 0:
            bars.append(Bar(TRAINER, does, at_s, took_s, int(number(step, "step")), name == "groups_wait_s"))
            at_s += took_s
    return bars


def _of_others(step: Record, start_s: float, all_s: float) -> list[Bar]:
    busy_s, closed_s = number(step, "engine_busy", 0.0) * all_s, number(step, "gate_closed", 0.0) * all_s
    queued_s, scored_s = number(step, "scorer_queue_p50_s", 0.0), number(step, "scorer_p50_s", 0.0)
    lengths = (
        (ENGINE, "generates (share of the step)", 0.0, busy_s, False),
        (ENGINE, "stands still (share of the step)", busy_s, all_s - busy_s, True),
        (GATE, "held back by max_staleness (share of the step)", 0.0, closed_s, True),
        (REWARDS, "median group waits for a worker", 0.0, queued_s, True),
        (REWARDS, "median group is scored", queued_s, scored_s - queued_s, False),
        (PUSH, "engines load the newest Version", 0.0, number(step, "load_s", 0.0), False),
    )
    return [
        Bar(lane, does, start_s + after_s, min(took_s, all_s - after_s), int(number(step, "step")), is_wait)
        for lane, does, after_s, took_s, is_wait in lengths
        if 0 <= after_s < all_s and took_s > 0
    ]
