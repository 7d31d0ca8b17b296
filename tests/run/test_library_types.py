"""The library's types: a checker accepts a user's script, and refuses its mistakes where the user made them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import asyncio
import random
from collections.abc import Sequence

import shoal


@shoal.environment("sums")
class Sums:
    def draw(self, rng: random.Random) -> shoal.Question:
        a, b = rng.randrange(100), rng.randrange(100)
        return shoal.Question(f"What is {a} + {b}?", answer=str(a + b))

    async def rollout(self, task: shoal.Task, model: shoal.Model) -> shoal.Outcome:
        said: shoal.Message = await model.answer(task.messages)
        if not said.content:
            raise shoal.PolicyFailed("it said nothing")
        return shoal.Outcome(reward=float(said.content == task.answer))


def right(prompts: list[object], completions: list[list[dict[str, str]]], answer: list[str]) -> list[float]:
    return [float(one[-1]["content"] == truth) for one, truth in zip(completions, answer)]


def letters(prompts: list[object], completions: list[object]) -> str:
    return "no numbers"


async def sampled(engine: shoal.Engine, ids: Sequence[int]) -> list[shoal.Completion]:
    return await engine.generate(ids, shoal.Sampling(max_tokens=8, temperature=0.0))


async def loop() -> None:
    async with shoal.open_policy("demo", Sums, max_tokens=12, lora={"rank": 8}) as policy:
        groups: list[shoal.Group] = await policy.groups()
        turns: list[shoal.Turn] = [turn for group in groups for one in group.rollouts for turn in one.turns]
        stats: shoal.StepStats = await policy.step(groups)
        print(len(turns), stats.loss, await sampled(policy.engine, turns[0].rendered_ids))


result: shoal.Result = shoal.train("demo", reward=right, steps=5, lr=3e-4, checkpoint={"every_steps": 5})
shoal.train(tasks=["chain_sum", Sums, {"name": "mine", "service": "jsonl", "path": "rows.jsonl"}])
asyncio.run(loop())
shoal.train(stepz=5)  # refused
shoal.train(steps="5")  # refused
shoal.train(late="maybe")  # refused
shoal.train(checkpoint={"every": 5})  # refused
shoal.train(reward=letters)  # refused
"""
CONFIG = """
[mypy]
strict = True
follow_imports = silent
error_summary = False
[mypy-torch.*,transformers.*,starlette.*,uvicorn.*,aiohttp.*,matplotlib.*,numpy.*,rich.*]
follow_imports = skip
"""


@pytest.mark.timeout(600)
def test_a_type_checker_accepts_a_users_script_and_refuses_its_mistakes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = (sys.executable, "-m", "mypy", f"--cache-dir={ROOT / 'build' / 'mypy'}", "script.py")
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    wrong = [int(line) for line in re.findall(r"^script\.py:(\d+): error", checked.stdout, re.MULTILINE)]
    expected = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# refused")]
    assert wrong == expected, checked.stdout + checked.stderr
