"""A run directory as a run leaves it, made with the real log and the real metrics, for those who show it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from buffer_values import META, RECEIPT, open_buffer
from shoal.config import parse, to_toml
from shoal.experience.held_out import HeldOutAnswer, write_answers
from shoal.observe.metrics import JsonlTracker
from shoal.observe.token_files import TokensFiles
from shoal.trainer.messages import CLIPPED
from shoal.types import (
    Completion,
    FinishReason,
    Group,
    Message,
    Reward,
    RewardStatus,
    Role,
    Rollout,
    RolloutStatus,
    Task,
    ToolCall,
    Turn,
)

GROUPS, SIZE = META.groups_per_step, 4


def rollout(
    name: str, answer: str, value: float, version: int, *, status: RewardStatus = RewardStatus.SCORED
) -> Rollout:
    """An answer of one token per character, thought first, with a reward of two parts."""
    ids = tuple(6 + ord(c) % 90 for c in answer[:300]) or (6,)
    drawn = Completion(ids, tuple(-0.1 * (i % 30) for i in range(len(ids))), (version,) * len(ids), FinishReason.STOP)
    message = Message(Role.ASSISTANT, answer, (ToolCall("c1", "add", '{"a": 1}'),), reasoning=f"thinking of {name}")
    reward = Reward(value if status is RewardStatus.SCORED else 0.0, status, (("right", value),), f"judged {name}")
    return Rollout(name, (Message(Role.USER, f"question {name}"), message), (Turn((7, 8, 9), drawn),), reward)


class MadeRun:
    """A run of which each step is written when it is asked for."""

    def __init__(
        self, run_dir: Path, model: Path | str = "demo", *, task: str = "chain_sum", **settings: object
    ) -> None:
        self.run_dir, self.task = run_dir, task
        self.buffer = open_buffer(run_dir)
        config = {"run_dir": str(run_dir), "tasks": [{"name": task}], "model": {"path": str(model)}, **settings}
        (run_dir / "resolved.toml").write_text(to_toml(parse(config)))
        self.tracker = JsonlTracker(run_dir / "metrics.jsonl", clock=count().__next__)
        self.tracker.write("event", {"name": "machine", "cores": 4, "gpus": 1})
        self.steps = 0

    async def step(self, answers: Sequence[str] = ("right", "wrong")) -> None:
        """One more step, of groups whose answers are the given texts in turn; the first of each group is right."""
        version, names = self.steps, []
        trained: list[Rollout] = []
        for index in range(GROUPS):
            name = f"g{self.steps}-{index}"
            admitted = await self.buffer.admit(name, self.task)
            rollouts = tuple(
                rollout(f"{name}/{i}", answers[i % len(answers)], float(i == 0), admitted) for i in range(SIZE)
            )
            question = (Message(Role.USER, f"question {name}"),)
            task = Task(f"t-{name}", self.task, question, answer=f"truth of {name}", receipt=RECEIPT)
            await self.buffer.add(Group(name, task, rollouts, admitted))
            names.append(name)
            trained += rollouts
        await self.buffer.take(GROUPS, version)
        await self.buffer.consumed(self.steps, version, names, version_after=version + 1)
        self.steps += 1
        write_numbers(self.run_dir, self.steps, names, trained)
        self.buffer.on_loaded(version + 1)
        share = min(1.0, self.steps / 20)
        numbers = {"reward": share, f"solve_rate/{self.task}": share, "engine_busy": 0.9, "trainer_busy": 0.3}
        rates = {
            "version": float(version),
            "tokens_per_s": 100.0,
            "staleness_mean": 0.5,
            "length_mean": 9.0,
            "mismatch": 0.0,
        }
        waits = {
            "groups_wait_s": 0.6,
            "train_s": 0.3,
            "write_s": 0.05,
            "save_s": 0.0,
            "gate_closed": 0.1,
            "cut_share": 0.0,
        }
        self.tracker.log(self.steps, {**numbers, **rates, **waits})
        if self.steps % 5 == 1:
            self.evaluate(share, answers)

    async def fail(self, reason: str) -> None:
        """One more group, of which every rollout came to nothing."""
        admitted = await self.buffer.admit("failing", self.task)
        task = Task("t-failing", self.task, (Message(Role.USER, "question"),), receipt=RECEIPT)
        rollouts = tuple(failed(f"failing/{i}", reason) for i in range(SIZE))
        await self.buffer.add(Group("failing", task, rollouts, admitted))
        self.tracker.write("event", {"name": "rollout_failed", "reason": reason})

    def evaluate(self, share: float, answers: Sequence[str]) -> None:
        """One evaluation of two questions, of which the first is answered as the run's groups are."""
        scores = {"sampled": share, "sampled_reward": share, "greedy": None, "greedy_reward": None}
        self.tracker.write("eval", {"step": self.steps, **scores})
        kept = []
        for number, answer in enumerate((answers[0], f"after {self.steps} steps")):
            question = (Message(Role.USER, f"held-out question {number}"),)
            task = Task(f"held-out-{number}", self.task, question, answer=f"truth {number}")
            one = rollout(f"held-out-{number}", answer, share if number else 0.5, self.steps)
            one = replace(one, messages=(*question, *one.messages[1:]))
            kept.append(HeldOutAnswer.of(self.steps, task, "sampled", 0, one))
        write_answers(self.run_dir, self.steps, kept)

    async def close(self) -> None:
        """Ends the run."""
        self.tracker.close()
        await self.buffer.close()


def write_numbers(run_dir: Path, step: int, names: Sequence[str], trained: Sequence[Rollout]) -> None:
    """Numbers of each token as a trainer writes them: ratio e^0.05, and the third token of each row clipped."""
    counts = [one.sampled_tokens for one in trained]
    behaviour = np.concatenate([one.turns[0].completion.logprobs for one in trained]).astype(np.float32)
    first = np.cumsum(counts) - counts
    advantage = np.repeat([1.5 if at % SIZE == 0 else -0.5 for at in range(len(trained))], counts).astype(np.float32)
    fate = np.zeros(len(behaviour), np.uint8)
    fate[[at + 2 for at, count in zip(first, counts, strict=True) if count > 2]] = CLIPPED
    streams = {
        "row_R": np.arange(len(counts), dtype=np.int32),
        "count_R": np.array(counts, np.int32),
        "weight_R": np.full(len(counts), 0.01, np.float32),
        "logp_N": behaviour + np.float32(0.05),
        "entropy_N": np.full(len(behaviour), 0.5, np.float16),
        "advantage_N": advantage,
        "gradient_N": np.where(fate, 0.0, 0.01 * advantage * np.exp(0.05)).astype(np.float32),
        "fate_N": fate,
    }
    wish = TokensFiles(run_dir, 256).wanted(step, names)
    assert wish is not None
    Path(wish.path).parent.mkdir(exist_ok=True)
    groups = json.dumps([(name, SIZE) for name in names])
    save_file(streams, wish.path, metadata={"groups": groups})


def failed(name: str, reason: str) -> Rollout:
    """A rollout that came to nothing."""
    return Rollout(name, (), (), Reward(0.0), RolloutStatus.FAILED, reason)
