"""`python -m experiments.time_machine [--quick] [--only KEY] [--results D]`.

A key is replay/0, whatif/0, why/STEP or bisect/SEED. All use the log of one run, runs/time_machine, which is trained
first unless it is there.
"""

import asyncio
import math
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
from safetensors.numpy import load_file

from experiments.grid import Grid, Record, markdown
from experiments.time_machine.poison import drawn, poisoned
from shoal.errors import RunDirError
from shoal.experience.log import read, read_step, weights_of
from shoal.model.renderer_loading import load_renderer
from shoal.run.commands.bisect import Bisection, Metric, held_out_score
from shoal.run.commands.replay import BEGINNING, Replay, opened_replay, reading_steps, replay_steps, settings_of
from shoal.run.commands.starters import starter_folder
from shoal.run.commands.whatif import what_if
from shoal.run.prepare import model_directory
from shoal.trainer.advantage import step_samples
from shoal.trainer.ranks import ALONE
from shoal.trainer.row_files import fingerprint
from shoal.trainer.trainer import Trainer

Weights = dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]
HERE = Path(__file__).parent
QUICK = {"weighed": [2], "seeds": 3, "rerun": 3, "good": 10, "bad": 18, "size": 1000.0}


def main(arguments: list[str]) -> None:
    """Runs the experiment."""
    grid = Grid.asked(arguments, HERE, QUICK)
    plan = grid.plan
    keys = ["replay/0", "whatif/0", *(f"why/{step}" for step in plan["weighed"])]
    keys += [f"bisect/{seed}" for seed in range(plan["seeds"])]
    with tempfile.TemporaryDirectory() as name, asyncio.Runner() as runner:
        folder, opened = Path(name), AsyncExitStack()
        settings = [*plan["settings"], *(["train.steps=18"] if grid.quick else [])]
        run_dir = trained_run((folder if grid.quick else Path.cwd()) / "runs" / "time_machine", settings)
        replay = runner.run(opened.enter_async_context(replaying(run_dir)))

        async def measured(key: str) -> Record:
            what, number = key.split("/")
            match what:
                case "replay":
                    return await replayed(run_dir)
                case "whatif":
                    return await rerun(run_dir, plan["other"], plan["rerun"])
                case "why":
                    return await weighed(replay, int(number) - 1)
                case _:
                    return await bisected(replay, folder / f"poisoned-{number}", int(number), plan)

        def measure(key: str) -> Record:
            return runner.run(measured(key))

        runs = grid.completed(keys, measure)
        runner.run(opened.aclose())
        if runs:
            cells = summary(runs)
            grid.write(cells, table(cells))


def unheard(one: object) -> None:
    """Says nothing of a step."""


def trained_run(run_dir: Path, settings: Sequence[str]) -> Path:
    """Trains the starter's run, unless that has ended, and returns its folder."""
    if not (run_dir / "model").exists():
        config = starter_folder("first") / "run.toml"
        command = [sys.executable, "-m", "shoal.cli", "train", str(config), f"--run_dir={run_dir}"]
        subprocess.run([*command, *(f"--{one}" for one in settings)], check=True, stdout=subprocess.DEVNULL)
    return run_dir


async def replayed(run_dir: Path) -> Record:
    """Takes every step again, and counts those with other bits or statistics than recorded."""
    with reading_steps(run_dir) as logged:
        last = max(logged.records)
    found = await replay_steps(run_dir, 0, last, unheard)
    return {
        "steps": len(found),
        "differ": sum(not one.same for one in found),
        "unrecorded": sum(one.recorded is None for one in found),
        "weights": [one.weights for one in found],
    }


async def rerun(run_dir: Path, other: Sequence[str], steps: int) -> Record:
    """Trains steps under other settings by `whatif`, and by a trainer of this process on the same groups."""
    found = await what_if(run_dir, 0, steps - 1, [f"--{one}" for one in other], unheard)
    config = settings_of(run_dir, [f"--{one}" for one in other])
    model = model_directory(config.model.path)
    trainer = Trainer(model, config.model, config.train, config.rollout.temperature, config.rollout.max_tokens)
    differ = 0
    for one in found:
        groups = read(run_dir, partial(read_step, step=one.step))
        trainer.step(step_samples(groups, config.train, config.rollout.max_tokens), one.step, 0)
        trainer.count_push()
        assert one.stats is not None
        differ += fingerprint(trainer.tensors(), ALONE) != one.stats.weights
    own = read(run_dir, lambda connection: weights_of(connection, steps - 1))
    assert found[-1].stats is not None
    return {"steps": steps, "differ": differ, "is_the_run": found[-1].stats.weights == own}


async def weighed(replay: Replay, step: int) -> Record:
    """Influence of each group of a step to first order, and by leaving it out."""
    record, groups = replay.logged.records[step], replay.logged.groups(step)
    await replay.keep_after(step - 1)
    before = await weights(replay)
    first_order = {name: pair[0] for name, pair in (await replay.weigh(record)).items()}
    whole = await weights(replay)
    left_out = {}
    for group in groups:
        await replay.go_after(step - 1)
        await replay.take(record, [one for one in groups if one is not group])
        left_out[group.id] = distance(whole, await weights(replay)) / distance(whole, before)
    names = sorted(first_order)
    influence, change = ([of[name] for name in names] for of in (first_order, left_out))
    return {
        "groups": len(names),
        "rank_correlation": spearman(influence, change),
        "influence": [*influence],
        "left_out": [*change],
    }


async def bisected(replay: Replay, copy: Path, seed: int, plan: Mapping[str, Any]) -> Record:
    """Poisons copies of the log until one is damaged, and searches for that poison."""
    logged, saved, rng = replay.logged, replay.saved, random.Random(seed)
    good, bad = plan["good"], plan["bad"]
    renderer = load_renderer(model_directory(replay.steps.config.model.path))
    await replay.keep_after(good - 1)
    start = {step: saved[step] for step in (BEGINNING, good - 1)}
    found, harmless = None, 0
    while found is None:
        poison = drawn(logged.run_dir, good, bad, rng, plan["size"])
        poisoned(logged.run_dir, copy, poison)
        with reading_steps(copy) as replay.logged:
            replay.saved, replay.at = dict(start), None
            score = held_out_score(copy, Metric.HELDOUT, renderer)
            search = Bisection(replay, score, good - 1, bad - 1, print)
            try:
                found = await search.culprit(renderer)
            except RunDirError:
                harmless += 1
            for state in replay.saved.keys() - start:
                shutil.rmtree(replay.saved[state])
        shutil.rmtree(copy)
    replay.logged, replay.saved, replay.at = logged, saved, None
    groups = sorted(group.id for group in found.groups)
    at = next((i for i, one in enumerate(found.trials) if "tokens" in one.left_out), len(found.trials))
    candidates = (bad - good) * len(logged.groups(poison.step))
    return {
        "harmless_before": harmless,
        "kind": poison.kind,
        "step": poison.step + 1,
        "groups": [*poison.groups],
        "found_steps": [step + 1 for step in found.steps],
        "found_groups": [*groups],
        "right": found.steps == [poison.step] and groups == list(poison.groups),
        "trials": at,
        "most_trials": math.ceil(math.log2(candidates)) + 2,
        "token_trials": len(found.trials) - at,
        "found_tokens": len(found.tokens),
        "of_tokens": found.counts[1],
        "scores": [*found.scores, found.trials[-1].score],
    }


@asynccontextmanager
async def replaying(run_dir: Path) -> AsyncIterator[Replay]:
    """Opens the log of a run with a trainer for its steps."""
    with reading_steps(run_dir) as logged:
        async with opened_replay(logged) as replay:
            yield replay


async def weights(replay: Replay) -> Weights:
    """The trainer's present weights."""
    file = replay.folder / "weights.safetensors"
    await replay.trainer.write_version(file, push=False)
    return {name: tensor.astype(np.float64) for name, tensor in load_file(file).items()}


def distance(one: Weights, other: Weights) -> float:
    """Norm of the difference of all weights."""
    parts = (one[name] - other[name] for name in one)
    return math.sqrt(sum(float((part * part).sum()) for part in parts))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values share the mean of their ranks, so groups without influence have no order."""
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def ranks(values: Sequence[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Ranks from 1.

    >>> ranks([5.0, 0.0, 0.0])
    array([3. , 1.5, 1.5])
    """
    _, inverse, counts = np.unique(np.array(values), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def summary(runs: Sequence[Record]) -> list[Record]:
    """A record for each command."""
    of = {what: [run for run in runs if str(run["key"]).startswith(what)] for what in ("why", "bisect")}
    steps = {str(run["key"]).split("/")[0]: run for run in runs}
    correlations = [cast(float, run["rank_correlation"]) for run in of["why"]]
    over = [cast(int, run["trials"]) - cast(int, run["most_trials"]) for run in of["bisect"]]
    return [
        {"command": "replay", "steps": steps["replay"]["steps"], "differ": steps["replay"]["differ"]},
        {"command": "whatif", "steps": steps["whatif"]["steps"], "differ": steps["whatif"]["differ"]},
        {"command": "why", "steps": len(correlations), "least": min(correlations), "mean": fmean(correlations)},
        {
            "command": "bisect",
            "seeds": len(over),
            "found": sum(bool(run["right"]) for run in of["bisect"]),
            "most_over_bound": max(over),
        },
    ]


def table(cells: Sequence[Record]) -> str:
    """By command."""
    replay, whatif, why, bisect = cells
    rows = [
        ["replay", f"{replay['steps']} steps", f"{replay['differ']} differ in any bit"],
        ["whatif", f"{whatif['steps']} steps", f"{whatif['differ']} differ from a rerun in any bit"],
        ["why", f"{why['steps']} steps", f"rank correlation {why['least']:.3f} at least, {why['mean']:.3f} on average"],
        [
            "bisect",
            f"{bisect['seeds']} seeds",
            f"{bisect['found']} found, trials {bisect['most_over_bound']:+} of the bound",
        ],
    ]
    return markdown(["command", "of", "found"], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
