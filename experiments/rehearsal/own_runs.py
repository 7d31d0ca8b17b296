"""Real runs of the embedded model beside their rehearsal: the raw data of `experiments/async_speedup`.

The costs come from the synchronous runs alone (`max_staleness` 0): seconds of engine, trainer and main process per
step. The others are predicted from them. The main process stands as one scorer.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from shoal.config import Config
from shoal.rehearsal.costs import EngineCost, TrainerCost
from shoal.rehearsal.rehearse import rehearse
from shoal.rehearsal.scene import Scene, figures_of
from shoal.rehearsal.search import AnswerLengths

HERE = Path(__file__).parents[1] / "async_speedup"
PROMPT_TOKENS, SPREAD = 10, 0.25
"""Tokens of a question, and the spread of the lengths of an answer, which is a word of three to five letters."""


def own_runs() -> list[Mapping[str, object]]:
    """Steps per second and mean staleness of each `max_staleness`, measured and rehearsed."""
    plan = tomllib.loads((HERE / "experiment.toml").read_text())
    runs = [json.loads(line) for line in (HERE / "results" / "runs.jsonl").read_text().splitlines()]
    groups, size = plan["run"]["train"]["groups_per_step"], plan["run"]["rollout"]["group_size"]

    def mean(bound: int, name: str) -> float:
        return fmean(run[name] for run in runs if run["eta"] == bound)

    answers = groups * size
    step_s, tokens = answers / mean(0, "samples_per_s"), mean(0, "tokens_per_s") / mean(0, "samples_per_s")
    engine_s, trainer_s = step_s * mean(0, "engine_busy"), step_s * mean(0, "trainer_busy")
    main_s = step_s - engine_s - trainer_s
    lengths = AnswerLengths.spread(tokens, plan["run"]["rollout"]["max_tokens"], PROMPT_TOKENS, SPREAD)
    engine = EngineCost(0.0, sequence_s=engine_s / (answers * tokens), places=plan["run"]["engine"]["max_running"])
    rows: list[Mapping[str, object]] = []
    for bound in plan["etas"]:
        config = Config.model_validate(
            {
                **plan["run"],
                "tasks": [{"name": "words"}],
                "train": {**plan["run"]["train"], "steps": STEPS},
                "asynchrony": {"max_staleness": bound},
                "eval": EVAL,
            }
        )
        score_s = main_s / answers
        trainer = TrainerCost(trainer_s, 0.0)
        scene = Scene(config, engine, 1, trainer, lengths.length, lengths.mean, PROMPT_TOKENS, lambda rng, s=score_s: s)
        found = figures_of(scene, rehearse(scene))
        measured = mean(bound, "samples_per_s") / answers
        rows.append(
            {
                "max_staleness": bound,
                "fitted": bound == 0,
                "steps_per_s": round(measured, 2),
                "rehearsed_steps_per_s": round(1 / found.step_s, 2),
                "error": round(1 / found.step_s / measured - 1, 3),
                "staleness": round(mean(bound, "staleness_mean"), 2),
                "rehearsed_staleness": round(found.staleness_mean, 2),
            }
        )
    return rows


STEPS = 60
EVAL = {"every_steps": 0, "questions": 8}
