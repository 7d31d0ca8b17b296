"""Cheap runs with known ends, and whether forecasts of them hold.

    python tests/support/cheap_runs.py RUNS [FIRST_SEED]

A run is the real trainer with the real advantages and loss on a tiny model, in this process. Its answers are one token,
sampled from a copy of the trainer's weights. Rates, sizes, tasks and rewards differ by seed; some runs learn nothing.
Prints a line of JSON per run, with its held-out accuracies, and a last line with the coverage of the forecasts.
"""

import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import torch
from transformers import PreTrainedModel

from engine_models import plain, saved
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.observe.forecast import LEAST_SHARE, Forecast, forecast
from shoal.trainer.advantage import step_samples
from shoal.trainer.trainer import Trainer
from shoal.types import Completion, FinishReason, Group, Message, Reward, Role, Rollout, Task, Turn

STEPS, EVERY, QUESTIONS, VOCABULARY = 100, 5, 64, 16
FIRST_LOOK = round(LEAST_SHARE * STEPS) // EVERY + 1
"""Number of evaluations of the first forecast."""
GOALS = (0.3, 0.5, 0.7, 0.9)


def cheap_run(seed: int) -> dict[str, object]:
    """One run: its settings, and the sampled accuracy on held-out questions before and every `EVERY` steps."""
    rng = Random(seed)
    lr, size, groups = math.exp(rng.uniform(math.log(3e-4), math.log(1e-2))), rng.choice([4, 8]), rng.choice([8, 16])
    letters, noise, chance = rng.randrange(2, 7), rng.choice([0.0, 0.0, 0.2]), rng.choice([0.0, 0.0, 0.0, 0.0, 1.0])
    truth = {(a, b): rng.randrange(2, VOCABULARY) for a in range(2, 2 + letters) for b in range(2, 2 + letters)}
    if rng.random() < 0.5:  # the second letter does not matter, so that questions help one another
        truth = {(a, b): truth[a, 2] for a, b in truth}
    asked = [rng.choice(list(truth)) for _ in range(QUESTIONS)]
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        model = saved("Qwen2", Path(folder), seed=seed, vocabulary=VOCABULARY, num_key_value_heads=2)
        config = TrainConfig(lr=lr, steps=STEPS, groups_per_step=groups, warmup_steps=0)
        trainer, engine = Trainer(model, ModelConfig(device="cpu"), config), plain(model)
    accuracies = [accuracy(engine, asked, truth)]
    for step in range(STEPS):
        prompts = [rng.choice(list(truth)) for _ in range(groups)]
        tokens, logps = sampled(engine, [prompt for prompt in prompts for _ in range(size)])
        taken = []
        for number, prompt in enumerate(prompts):
            rollouts = []
            for at in range(number * size, (number + 1) * size):
                is_right = tokens[at] == truth[prompt] if rng.random() >= noise else rng.random() < 0.5
                reward = Reward(float(rng.random() < 0.5 if chance else is_right))
                drawn = Completion((tokens[at],), (logps[at],), (step,), FinishReason.STOP)
                said = (Message(Role.USER, "?"), Message(Role.ASSISTANT, str(tokens[at])))
                rollouts.append(Rollout(f"{step}-{at}", said, (Turn(prompt, drawn),), reward))
            taken.append(Group(f"{step}-{number}", Task("t", "s", ()), tuple(rollouts), step))
        trainer.step(step_samples(taken, config, 1), version=step)
        engine.load_state_dict(trainer.model.state_dict())
        if (step + 1) % EVERY == 0:
            accuracies.append(accuracy(engine, asked, truth))
    return {"seed": seed, "lr": lr, "chance": chance, "noise": noise, "accuracies": accuracies}


@torch.no_grad()
def sampled(engine: PreTrainedModel, prompts: Sequence[tuple[int, int]]) -> tuple[list[int], list[float]]:
    """A token for each prompt, with its logprob in nats."""
    logp_BV = torch.log_softmax(engine(torch.tensor(prompts)).logits[:, -1].float(), -1)
    token_B1 = torch.multinomial(logp_BV.exp(), 1)
    return token_B1[:, 0].tolist(), logp_BV.gather(1, token_B1)[:, 0].clamp(max=0).tolist()


def accuracy(engine: PreTrainedModel, asked: Sequence[tuple[int, int]], truth: Mapping[tuple[int, int], int]) -> float:
    """Share of right answers, one sampled for each question."""
    tokens, _ = sampled(engine, asked)
    return sum(token == truth[prompt] for token, prompt in zip(tokens, asked, strict=True)) / len(asked)


def coverage(runs: Sequence[Sequence[float]]) -> dict[str, object]:
    """How often the last accuracy was within the interval, by step of the look, and how runs were given up.

    A run is given up at the first look that says so; `wrongly` counts those that had reached the goal at their end.
    """
    inside: dict[int, list[bool]] = {}
    ends = {goal: {"missed": 0, "given_up": 0, "reached": 0, "wrongly": 0, "steps_spared": 0} for goal in GOALS}
    for accuracies in runs:
        looks = {EVERY * (count - 1): looked(accuracies[:count]) for count in range(FIRST_LOOK, len(accuracies))}
        for step, found in looks.items():
            low, high = found.bounds
            inside.setdefault(step, []).append(low <= accuracies[-1] <= high)
        for goal, end in ends.items():
            at = next((step for step, found in looks.items() if not found.gets_there(goal)), None)
            is_reached = accuracies[-1] >= goal
            end["reached" if is_reached else "missed"] += 1
            if at is not None:
                end["wrongly" if is_reached else "given_up"] += 1
                end["steps_spared"] += 0 if is_reached else STEPS - at
    shares = {step: round(sum(each) / len(each), 3) for step, each in inside.items()}
    return {"runs": len(runs), "inside_90": shares, "goals": {str(goal): end for goal, end in ends.items()}}


def looked(accuracies: Sequence[float]) -> Forecast:
    """Forecast after these evaluations of a cheap run."""
    found = forecast([EVERY * i for i in range(len(accuracies))], accuracies, QUESTIONS, STEPS)
    assert found is not None
    return found


if __name__ == "__main__":
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    runs = []
    for seed in range(first, first + count):
        runs.append(cheap_run(seed))
        print(json.dumps(runs[-1]), flush=True)
    print(json.dumps(coverage([run["accuracies"] for run in runs])))  # type: ignore[misc]
