"""All runs of a regime at once: each seed has two nodes of 80,000 parameters, one per arm, in stacked tensors.

A run has its own questions, optimizer and pool. Both runs of a seed have the same questions and first weights.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean

import torch

from experiments.grid import Record
from experiments.question_pool.asked import Asked
from experiments.sapo_stacked.nodes import Nodes
from experiments.sapo_stacked.questions import Question
from experiments.sapo_stacked.rounds import Group, Scale, groups_of, learn, warm_weights
from shoal.rollout.question_pool import QuestionPool
from shoal.tasks.holdout import order_of
from shoal.types import Group as Answered
from shoal.types import Reward, Rollout, Task, seed_for


class Run:
    """Chooses the questions of one node."""

    def __init__(self, arm: str, seed: int, questions: Sequence[Question], each: int) -> None:
        self.arm, self.seed, self._questions = arm, seed, questions
        tasks = [Task(f"asked/{number}", "asked", ()) for number in range(len(questions))]
        self._pool = QuestionPool(tasks, each, seed_for("question pool", seed)) if arm == "pool" else None
        self._running: list[Task] = []
        self.asked = set[str]()
        self.informative: list[float] = []
        self.accuracies: list[tuple[int, float]] = []

    def drawn(self, first: int, count: int) -> list[Question]:
        """The questions of the groups from `first` on."""
        if self._pool is None:
            places = [divmod(index, len(self._questions)) for index in range(first, first + count)]
            chosen = [order_of(seed_for("uniform", self.seed, epoch), len(self._questions))[at] for epoch, at in places]
        else:
            self._running = [self._pool.draw(index) for index in range(first, first + count)]
            chosen = [int(task.id.split("/")[1]) for task in self._running]
        return [self._questions[number] for number in chosen]

    def answered(self, groups: Sequence[Group]) -> None:
        """Notes a step's answers, in the order of its questions."""
        self.asked |= {group.question.text for group in groups}
        self.informative.append(fmean(min(group.rewards) < max(group.rewards) for group in groups))
        for task, group in zip(self._running, groups, strict=False):
            assert self._pool is not None
            rollouts = tuple(Rollout(task.id, (), (), Reward(value)) for value in group.rewards)
            self._pool.answered(Answered(task.id, task, rollouts, 0))
            self._pool.ended(task)


def stacked(plan: Mapping[str, object], seeds: Sequence[int], arms: Sequence[str]) -> list[Record]:
    """Trains every run of a regime."""
    asked = Asked.of(plan)
    scale = Scale(nodes=len(seeds) * len(arms), warm_steps=plan["warm_steps"], lr=plan["lr"])
    split = {seed: asked.split(seed, plan["training"], plan["held_out"]) for seed in seeds}
    runs = [Run(arm, seed, split[seed][0], scale.each) for seed, arm in product(seeds, arms)]
    nodes = Nodes(scale.shape, scale.nodes, seed=0)
    nodes.load(warm_weights(scale, asked.warm, 0.0))
    generator = torch.Generator().manual_seed(0)
    for step in range(plan["steps"] + 1):
        if step % plan["every_steps"] == 0:
            found = groups_of(nodes, [split[run.seed][1] for run in runs], 4, generator)
            for run, groups in zip(runs, found, strict=True):
                rollouts = step * plan["groups"] * scale.each
                run.accuracies.append((rollouts, round(fmean(fmean(one.rewards) for one in groups), 4)))
        if step < plan["steps"]:
            count = plan["groups"]
            drawn = groups_of(nodes, [run.drawn(step * count, count) for run in runs], scale.each, generator)
            for run, groups in zip(runs, drawn, strict=True):
                run.answered(groups)
            learn(nodes, [[(group, False) for group in groups] for groups in drawn], scale.lr)
    return [
        {
            "arm": run.arm,
            "seed": run.seed,
            "accuracies": run.accuracies,
            "informative": [round(share, 4) for share in run.informative],
            "distinct": len(run.asked),
        }
        for run in runs
    ]
