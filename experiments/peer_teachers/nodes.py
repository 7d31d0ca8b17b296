"""Nodes with a specialty and a tokenizer each: the models that they begin with, and what they wrote."""

import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from experiments.grid import Record
from experiments.sapo.node import Scale, settings, swarm_settings, task_configs, tasks, train_all
from experiments.sapo.warm import pools_of, taught
from shoal.config import Config, parse
from shoal.experience.audit import audit
from shoal.observe.metrics import read_records
from shoal.run.demo_model.architecture import PAIRS, character_tokenizer, pair_tokenizer
from shoal.swarm.server import NatsServer, ServerOptions
from shoal.types import seed_for

QUESTIONS = 600
"""Training questions that a specialist has seen, with repeats."""
TOKENIZERS = {"none": [], "letters": PAIRS, "digits": [f"{number:02d}" for number in range(100)]}
"""Pairs of characters that are one token."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What a node trains in a step, and whether nodes teach."""

    own: int
    external: int
    teach: bool


def specialist_model(folder: Path, family: str, pairs: str, seed: int, scale: Scale) -> Path:
    """Makes a model that has seen right answers of one task."""
    rng = random.Random(seed_for("specialist", family, seed))
    (pool,) = pools_of([task for task in task_configs() if task.name == family], QUESTIONS if scale.every else 20)
    tokenizer = pair_tokenizer(TOKENIZERS[pairs]) if TOKENIZERS[pairs] else character_tokenizer()
    return taught(folder, tokenizer, seed, scale, lambda: ((one := rng.choice(pool)), one.answer or ""))


async def run_nodes(folder: Path, models: dict[str, Path], condition: Condition, seed: int, scale: Scale) -> Record:
    """Trains a node for each specialty at once, on questions of all of them; gives the nodes' curves."""
    runs = [folder / f"node-{i}" for i in range(len(models))]
    async with AsyncExitStack() as stack:
        server = ""
        if condition.external:
            server = (await stack.enter_async_context(NatsServer(ServerOptions(folder / "server")))).url
        await train_all(
            node_config(run, model, list(models), condition, 1000 * seed + i, scale, server)
            for i, (run, model) in enumerate(zip(runs, models.values(), strict=True))
        )
    return record_of(runs, list(models))


def node_config(
    run: Path, model: Path, families: list[str], condition: Condition, seed: int, scale: Scale, server: str
) -> Config:
    """One node; answers of peers are compared with its own skill, since a specialist's are often right as a whole."""
    asked = [task for task in tasks() if isinstance(task, dict) and task["name"] in families]
    swarm = {"external_groups": 0}
    if condition.external:
        swarm = {
            **swarm_settings(server, condition.own, condition.external, scale),
            "credit": "skill_drop",
            "teach": condition.teach,
        }
    return parse({**settings(run, model, asked, condition.own, scale), "seed": seed, "swarm": swarm})


def record_of(runs: list[Path], families: list[str]) -> Record:
    """Held-out accuracy (sampled) by node, evaluation and task; what was trained; and whether the logs are sound."""
    found = [read_records(run / "metrics.jsonl") for run in runs]
    steps = [[one for one in records if one["kind"] == "step"] for records in found]

    def total(name: str) -> list[int]:
        return [sum(int(float(str(one.get(name, 0)))) for one in records) for records in steps]

    return {
        "families": families,
        "curves": [
            [
                [int(float(str(one["step"]))), *(round(float(str(one[f"sampled/{task}"])), 4) for task in families)]
                for one in records
                if one["kind"] == "eval"
            ]
            for records in found
        ],
        "external": total("external"),
        "lessons": total("lessons"),
        "scored": total("offers_scored"),
        "audits_clean": sum(audit(run).ok for run in runs),
    }
