"""`python -m experiments.sapo_real.specialties`: what the model gets right at first, and so which settings it has.

A specialty has reasoning-gym's own settings where one answer at least is right with them, else the easiest ones, and is
left out where these give none either.
"""

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from experiments.grid import Record
from experiments.sapo.replaced import EASIEST
from experiments.sapo_stacked.questions import SETTINGS
from shoal.config import parse
from shoal.run.commands.prospect import prospect_of

RECIPE = Path(__file__).parents[2] / "examples" / "sapo" / "node.toml"
EASY: dict[str, JsonValue] = {**SETTINGS, **{str(one["name"]): one["params"] for one in EASIEST}}
"""The easiest settings of each specialty."""


def recipe() -> dict[str, JsonValue]:
    """The node that examples/sapo ships."""
    return tomllib.loads(RECIPE.read_text())


def own_tasks() -> list[dict[str, JsonValue]]:
    """The specialties with reasoning-gym's own settings."""
    return recipe()["tasks"]


def start_of(model: str, each: int, seconds: float) -> Record:
    """Figures of each specialty before training, with own and with easiest settings; `seconds` for each of both."""
    easy = [{**task, "params": EASY[str(task["name"])]} for task in own_tasks()]
    found: Record = {}
    for name, tasks in (("own", own_tasks()), ("easiest", easy)):
        config = parse(node(model, tasks, each) | {"swarm": {"external_groups": 0}})
        found[name] = prospect_of(config, seconds, lambda words: print(words, file=sys.stderr)).tables
    return found


def node(model: str, tasks: Sequence[dict[str, JsonValue]], each: int) -> dict[str, JsonValue]:
    """The recipe with another model, other tasks and so many answers to a question."""
    found = recipe()
    settings: dict[str, JsonValue] = found["rollout"]
    where = {"path": model, "dtype": "auto"}
    return {**found, "model": where, "tasks": list(tasks), "rollout": {**settings, "group_size": each}}


def chosen(start: Mapping[str, Mapping[str, Mapping[str, object]]]) -> list[dict[str, JsonValue]]:
    """The specialties as the nodes have them.

    >>> figures = {"own": {"bf": {"full_marks": 0.0}}, "easiest": {"bf": {"full_marks": 0.25}}}
    >>> chosen({side: {task["name"]: {} for task in own_tasks()} | rows for side, rows in figures.items()})
    [{'name': 'bf', 'reward': 'correct', 'params': {'difficulty': 1}}]
    """
    tasks = []
    for task in own_tasks():
        name = str(task["name"])
        own, easy = (float(str(start[side][name].get("full_marks") or 0)) for side in ("own", "easiest"))
        if own or easy:
            tasks.append(task if own else {**task, "params": EASY[name]})
    return tasks


def started(results: Path, model: str, each: int, seconds: float) -> list[dict[str, JsonValue]]:
    """The specialties by start_warm.json, which is measured first where it is missing."""
    file = results / "start_warm.json"
    if not file.exists():
        results.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(start_of(model, each, seconds), indent=1) + "\n")
    return chosen(json.loads(file.read_text()))
