"""A run directory as a run leaves it, made with the real log and the real metrics, for those who show it."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from buffer_values import META, RECEIPT, open_buffer
from shoal.config import parse, to_toml
from shoal.observe.metrics import JsonlTracker
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
        self.steps = 0

    async def step(self, answers: Sequence[str] = ("right", "wrong")) -> None:
        """One more step, of groups whose answers are the given texts in turn; the first of each group is right."""
        version, names = self.steps, []
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
        await self.buffer.take(GROUPS, version)
        await self.buffer.consumed(self.steps, version, names, version_after=version + 1)
        self.steps += 1
        self.buffer.on_loaded(version + 1)
        share = min(1.0, self.steps / 20)
        numbers = {"reward": share, f"solve_rate/{self.task}": share, "engine_busy": 0.9, "trainer_busy": 0.3}
        rates = {"version": float(version), "tokens_per_s": 100.0, "staleness_mean": 0.5, "length_mean": 9.0}
        self.tracker.log(self.steps, {**numbers, **rates})
        if self.steps % 5 == 1:
            scores = {"sampled": share, "sampled_reward": share, "greedy": None, "greedy_reward": None}
            self.tracker.write("eval", {"step": self.steps, **scores})

    async def close(self) -> None:
        """Ends the run."""
        self.tracker.close()
        await self.buffer.close()


def failed(name: str, reason: str) -> Rollout:
    """A rollout that came to nothing."""
    return Rollout(name, (), (), Reward(0.0), RolloutStatus.FAILED, reason)
