"""The side that holds a run up, in one sentence with the setting that moves it."""

import math

from shoal.observe.runs import RunRecords
from shoal.observe.status import LATELY, lately

BUSY = 0.8
"""Share of the time from which on a side is not waiting for anybody worth mentioning."""


def bottleneck(run: RunRecords) -> str:
    """The sentence, from the last steps; it says so when the numbers do not tell."""
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
        return (
            f"Generation is the slower side {figures}: the trainer waits for groups {1 - trainer:.0%} of the time. "
            f"More engines (engine.count, engine.urls), engine.max_running{now}, or shorter answers move it."
        )
    return (
        f"Training is the slower side {figures}: the engine stands still {1 - engine:.0%} of the time. "
        "train.ranks or a larger train.tokens_per_microbatch move it; asynchrony.max_staleness does not."
    )


def _scorer(run: RunRecords) -> str:
    queued, took = lately(run, "scorer_queue_p50_s"), lately(run, "scorer_p50_s")
    if took is None or math.isnan(took):
        return "agents and tools, or the reward, are the likely ones"
    if queued is not None and queued > took / 2:
        return f"half of the groups wait {queued:.2g} s or more for a reward worker; reward.workers moves it"
    return f"a group's rewards take {took:.2g} s in the median; agents, tools or slow rewards are the likely ones"
