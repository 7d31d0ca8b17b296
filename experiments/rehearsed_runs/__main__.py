"""`python -m experiments.rehearsed_runs [--quick] [--only KEY] [--results D]`.

A key is bound/shape/seed. The runs of seed 0 served to choose how costs are fitted, and how wide the intervals are; the
others were made later. A run is cut into blocks of steps, so that what else the machine does is alike in both halves:
the costs of a rehearsal come from the blocks with even numbers, and its figures are judged on those with odd ones.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, cast

from experiments.grid import Grid, Record, markdown
from experiments.timed import measured_run, number
from shoal.config import Config, parse
from shoal.rehearsal.costs import EngineCost, TrainerCost
from shoal.rehearsal.rehearse import rehearse
from shoal.rehearsal.scene import Scene, figures_of
from shoal.rehearsal.search import AnswerLengths

HERE = Path(__file__).parent
QUICK = {"bounds": [0, 1], "seeds": [0], "steps": 28, "block": 2, "shapes": {"few": ["train.groups_per_step=4"]}}
COLUMNS = (
    "step_s", "train_s", "write_s", "save_s", "load_s", "groups_wait_s", "engine_busy", "trainer_busy",
    "staleness_mean", "length_mean", "scorer_p50_s",
)  # fmt: skip
FILLING = 12
"""First steps, in which the pipeline fills up and products are compiled."""
PROMPT_TOKENS, SPREAD = 10, 0.25
"""Tokens of a question, and the spread of the lengths of an answer, which is a word of three to five letters."""
STEPS = 100
T_95 = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 6: 1.94, 7: 1.89, 8: 1.86}
"""Student's t by degrees of freedom: 5 % are above."""

WIDER = 2.0
"""Factor of the intervals that blocks alone would give: with 1, those of seed 0 held in 70 %."""

Columns = Mapping[str, Sequence[float]]


def main(arguments: list[str]) -> None:
    """Runs the experiment."""
    grid = Grid.asked(arguments, HERE, QUICK, threads=None)
    plan = grid.plan
    keys = [f"{bound}/{shape}/{seed}" for seed in plan["seeds"] for shape in plan["shapes"] for bound in plan["bounds"]]

    def measure(key: str) -> Record:
        timed = measured_run(plan["run"], settings(key, plan))
        return {name: [round(number(step, name), 4) for step in timed.steps] for name in COLUMNS}

    if runs := grid.completed(keys, measure):
        by_key = {str(run["key"]): run for run in runs}
        cells = [judged(run, by_key[f"0/{key.partition('/')[2]}"], plan) for key, run in by_key.items()]
        seeds = {f"seed {seed}": summary([cell for cell in cells if cell["seed"] == seed]) for seed in plan["seeds"]}
        grid.write([seeds, *cells], table(cells))


def settings(key: str, plan: Mapping[str, Any]) -> list[str]:
    """Settings of a cell."""
    bound, shape, seed = key.split("/")
    own = [f"train.steps={plan['steps']}", f"asynchrony.max_staleness={bound}", f"seed={seed}"]
    return [*own, *plan["shapes"][shape]]


def blocks(run: Record, size: int) -> tuple[list[Columns], list[Columns]]:
    """Settled steps in blocks with even and odd numbers."""
    columns = {name: cast("list[float]", run[name])[FILLING:] for name in COLUMNS}
    starts = range(0, len(columns["step_s"]) - size + 1, size)
    cut: list[Columns] = [{name: values[at : at + size] for name, values in columns.items()} for at in starts]
    return cut[0::2], cut[1::2]


def mean(some: Sequence[Columns], name: str) -> float:
    """Mean of a column over blocks."""
    return fmean(value for block in some for value in block[name])


def rate(some: Sequence[Columns]) -> float:
    """Steps per second."""
    return 1 / mean(some, "step_s")


def busy_s(some: Sequence[Columns]) -> float:
    """Seconds of a step in which the engine sampled."""
    return fmean(s * busy for block in some for s, busy in zip(block["step_s"], block["engine_busy"], strict=True))


def pause_s(some: Sequence[Columns]) -> float:
    """Seconds of a load alone: the shortest one, since the others waited for the step of the engine."""
    return min(value for block in some for value in block["load_s"])


def main_share(synchronous: Sequence[Columns]) -> float:
    """Seconds of the main process per second of the engine, of a run in which one works after the other."""
    others = sum(mean(synchronous, name) for name in ("train_s", "write_s", "load_s")) + busy_s(synchronous)
    return max(mean(synchronous, "step_s") - others, 0.0) / busy_s(synchronous)


def scene_of(config: Config, fit: Sequence[Columns], share: float) -> Scene:
    """The scene whose costs are those of some blocks. The main process stands as one scorer."""
    tokens, answers = mean(fit, "length_mean"), config.train.groups_per_step * config.rollout.group_size
    engine = EngineCost(
        0.0,
        sequence_s=busy_s(fit) / (answers * tokens),
        load_s=pause_s(fit),
        places=config.engine.max_running,
    )
    write_s, wait_s = mean(fit, "write_s"), mean(fit, "groups_wait_s")
    trainer = TrainerCost(max(mean(fit, "step_s") - wait_s - write_s, 0.0), 0.0, write_s=write_s)
    lengths = AnswerLengths.spread(tokens, config.rollout.max_tokens, PROMPT_TOKENS, SPREAD)
    main_s = share * busy_s(fit) / answers
    return Scene(config, engine, 1, trainer, lengths.length, lengths.mean, PROMPT_TOKENS, lambda rng: main_s)


def judged(run: Record, synchronous: Record, plan: Mapping[str, Any]) -> Record:
    """A run beside the rehearsal by its other half."""
    key, size = str(run["key"]), int(plan["block"])
    fit, judge = blocks(run, size)
    config = parse(dict(plan["run"]), settings(key, plan))
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": STEPS})})
    scene = scene_of(config, fit, main_share(blocks(synchronous, size)[0]))
    found = figures_of(scene, rehearse(scene))
    rates = [rate([block]) for block in fit]
    wide = WIDER * T_95[len(rates) - 1] * stdev(rates) / fmean(rates) * (1 / len(fit) + 1 / len(judge)) ** 0.5
    measured, rehearsed, stale = rate(judge), 1 / found.step_s, mean(judge, "staleness_mean")
    return {
        "key": key,
        "seed": int(key.rpartition("/")[2]),
        "steps_per_s": round(measured, 3),
        "rehearsed_steps_per_s": round(rehearsed, 3),
        "error": round(rehearsed / measured - 1, 3),
        "drift": round(rate(fit) / measured - 1, 3),
        "within": rehearsed * (1 - wide) <= measured <= rehearsed * (1 + wide),
        "wide": round(wide, 3),
        "staleness": round(stale, 2),
        "rehearsed_staleness": round(found.staleness_mean, 2),
        "staleness_error": round(found.staleness_mean / stale - 1, 3) if stale else None,
    }


def summary(cells: Sequence[Record]) -> Record:
    """Median errors, and how often the intervals held."""
    stale = [abs(cast(float, cell["staleness_error"])) for cell in cells if cell["staleness_error"] is not None]
    return {
        "configs": len(cells),
        "median_error": round(median(abs(cast(float, cell["error"])) for cell in cells), 3),
        "median_drift": round(median(abs(cast(float, cell["drift"])) for cell in cells), 3),
        "median_staleness_error": round(median(stale), 3) if stale else None,
        "within": round(fmean(bool(cell["within"]) for cell in cells), 3),
    }


def table(cells: Sequence[Record]) -> str:
    """By configuration."""
    head = ["bound/shape/seed", "steps/s", "rehearsed", "error", "interval holds", "staleness", "rehearsed"]
    names = ("key", "steps_per_s", "rehearsed_steps_per_s", "error", "within", "staleness", "rehearsed_staleness")
    return markdown(head, [[str(cell[name]) for name in names] for cell in cells])


if __name__ == "__main__":
    main(sys.argv[1:])
