"""Timeline of a run's newest steps: bars of work and of waiting.

The trainer's bars are measured in sequence. The other lanes have only a share or a duration per step; their bars begin
with the step.
"""

from dataclasses import dataclass
from itertools import pairwise

from shoal.observe.metrics import Record, number
from shoal.observe.runs import RunRecords

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
