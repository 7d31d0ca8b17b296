"""The bottleneck of a run, in one sentence with the setting that moves it."""

import math

from shoal.observe.runs import RunRecords, known
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
