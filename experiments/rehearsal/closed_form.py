"""Mean staleness in closed form, and what a rehearsal measures.

Engines are the slower side, groups have one answer of exponential length, and the bound does not bind. Let P answers
run at once, B be the groups of a step, T the seconds between steps, and D the seconds from the start of a step to the
load of its Version. By Little's law a group spends (P + (B - 1) / 2) / B steps between its first token and its
training. A group whose age is A has ceil((A + D) / T) - 1 Versions of staleness, so with phases that are uniform

    mean = (P + (B - 1) / 2) / B + D / T - 1/2

If the trainer is slower and the bound is `max_staleness`, groups are sampled as soon as the gate opens, and every group
is exactly `max_staleness` Versions old.
"""

from collections.abc import Mapping

from shoal.config import Config
from shoal.rehearsal.costs import EngineCost, TrainerCost
from shoal.rehearsal.rehearse import rehearse
from shoal.rehearsal.scene import Scene, figures_of

MEAN, TOKEN_S = 400, 0.01
CASES = ((8, 4, 0.3), (16, 4, 0.2), (16, 8, 0.6), (32, 8, 0.4), (24, 4, 0.5), (12, 6, 0.1))
"""Answers at once, groups of a step, and the trainer's share of the time between steps."""
BOUNDS = (1, 2, 3, 5)


def closed_forms(steps: int = 240) -> list[Mapping[str, object]]:
    """Mean staleness by both, for engines that are slower and then for a trainer that is."""
    rows: list[Mapping[str, object]] = []
    for places, groups, share in CASES:
        period_s = groups * MEAN * TOKEN_S / places
        scene = _scene(places, groups, 1000, steps, share * period_s)
        expected = (places + (groups - 1) / 2) / groups + share - 0.5
        rows.append(_row(f"{places} answers, {groups} groups, trainer {share:g}", expected, scene))
    for bound in BOUNDS:
        rows.append(_row(f"slow trainer, bound {bound}", bound, _scene(64, 4, bound, 60, 30.0)))
    return rows


def _row(name: str, expected: float, scene: Scene) -> Mapping[str, object]:
    found = figures_of(scene, rehearse(scene)).staleness_mean
    return {"case": name, "closed": expected, "rehearsed": round(found, 4), "error": round(found / expected - 1, 4)}


def _scene(places: int, groups: int, bound: int, steps: int, train_s: float) -> Scene:
    config = Config.model_validate(
        {
            "tasks": [{"name": "sums"}],
            "train": {"steps": steps, "groups_per_step": groups, "advantage": "batch"},
            "rollout": {"group_size": 1, "max_tokens": 1 << 20},
            "engine": {"max_running": places},
            "asynchrony": {"max_staleness": bound},
            "eval": {"every_steps": 0, "questions": 1},
            "checkpoint": {"every_steps": 1_000_000},
        }
    )
    engine, trainer = EngineCost(TOKEN_S, places=places), TrainerCost(train_s, 0.0)
    return Scene(config, engine, 1, trainer, lambda rng: 1 + int(rng.expovariate(1 / MEAN)), MEAN, 0)
