"""The negative control: the demo's model is trained with rewards drawn by chance, and what its runs then claim.

    python tests/support/random_rewards.py RUNS [FIRST_SEED] [--STEPS]

Each run is a `shoal train` process. A hook replaces the rewards of training by a coin's; held-out answers are scored as
ever. Prints a line of JSON per run.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

from shoal.types import Group, Reward

STEPS = 30
QUESTIONS = 128


def coin(group: Group) -> Group:
    """The group with rewards of 0 or 1 that do not depend on the answers."""
    sides = (Random(one.id).randrange(2) for one in group.rollouts)
    rows = zip(group.rollouts, sides, strict=True)
    return replace(group, rollouts=tuple(replace(one, reward=Reward(float(side))) for one, side in rows))


def random_run(seed: int, steps: int, questions: int) -> dict[str, object]:
    """One run: accuracies before and after, and the sentence with which it ends."""
    shoal = [sys.executable, "-m", "shoal.cli"]
    with tempfile.TemporaryDirectory(prefix="random-rewards-") as made:
        folder = Path(made)
        subprocess.run([*shoal, "init", "first", str(folder / "run")], check=True, capture_output=True)
        config = (folder / "run" / "run.toml").read_text()
        asked = config.replace('reward = "correct"', f'reward = "{Path(__file__)}:coin"')
        assert asked != config, "the starter's reward has another form now"
        (folder / "run.toml").write_text(asked)
        settings = [f"--train.steps={steps}", f"--eval.questions={questions}", "--eval.every_steps=0", f"--seed={seed}"]
        train = [*shoal, "train", "run.toml", "--json", "--run_dir=made", "--checkpoint.every_steps=1000", *settings]
        done = subprocess.run(train, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"seed {seed}: {done.stderr[-2000:]}")
        found = json.loads(done.stdout)
    names = ("accuracy_before", "accuracy_after", "greedy_before", "greedy_after", "reward_first", "reward_last")
    return {"seed": seed, "steps": steps, **{name: found[name] for name in names}, "improvement": found["improvement"]}


if __name__ == "__main__":
    runs, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for seed in range(first, first + runs):
        print(json.dumps(random_run(seed, STEPS, QUESTIONS)), flush=True)
