"""One cell: N nodes, round after round of drawing, sharing, taking and learning (algorithm 1 of the paper).

Taking and advantages are Shoal's own (`swarm.strategy.choice`, `trainer.advantage`). All
nodes speak the same language, so that a peer's text has the peer's tokens; the behaviour is the node itself, so that
the first and only update of a round has ratio 1. Externals are of the same round; fewer than J informative ones are
fewer.
"""

import random
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import fmean

import torch
from torch import Tensor

from experiments.grid import Record
from experiments.sapo_stacked.nodes import END, MOST_ANSWER, PAD, Nodes, Shape, questions_tensor, text_of, token_ids
from experiments.sapo_stacked.questions import Question, lesson
from shoal.swarm.strategy.choice import LIKELY, Candidate, differ, uniform
from shoal.trainer.advantage import advantages
from shoal.types import seed_for

MOST_DRAWN = 2
"""Times the groups of a round that dynamic sampling may draw."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting of the experiment."""

    own: int
    external: int
    dynamic: bool = False
    """Draws more groups and keeps those whose rewards differ."""
    same: bool = False
    """All nodes are asked the same questions."""
    shuffled: bool = False
    """Peers' answers are trained as answers to another peer's question, with the rewards of their own."""
    negatives: str = "keep"
    """`drop` leaves out peers' answers that came out worse than their group; `likely` also weighs peers' tokens."""

    @classmethod
    def of(cls, name: str) -> "Cell":
        """Of a name such as 6/2, 8/0-dynamic, 4/4-same, 4/4-shuffled, 4/4-drop or 4/4-likely."""
        counts, _, variant = name.partition("-")
        own, external = map(int, counts.split("/"))
        named = {one: True for one in ("dynamic", "same", "shuffled") if one == variant}
        return cls(own, external, **named, negatives=variant if variant in ("drop", "likely") else "keep")


@dataclass(frozen=True, slots=True)
class Scale:
    """How large."""

    nodes: int = 8
    rounds: int = 80
    each: int = 8
    """Answers to one question."""
    lr: float = 3e-4
    eval_every: int = 40
    warm_steps: int = 800
    shape: Shape = field(default_factory=Shape)


@dataclass(slots=True)
class Group:
    """A question with its answers and rewards, of one node."""

    question: Question
    answers: Tensor  # [each, MOST_ANSWER]
    rewards: list[float]


def warm_weights(scale: Scale, questions: list[Question], rejected: float) -> dict[str, Tensor]:
    """Of one model that was shown answers, a share of them in formats that no scorer accepts."""
    rng = random.Random(seed_for("sapo warm start", str(rejected)))
    model = Nodes(scale.shape, 1, seed=0)
    tasks = sorted({one.task for one in questions})
    by_task = {task: [one for one in questions if one.task == task] for task in tasks}
    for step in range(scale.warm_steps):
        shown = [rng.choice(by_task[rng.choice(tasks)]) for _ in range(64)]
        answers = [[*token_ids(lesson(one, rejected, rng))[: MOST_ANSWER - 1], END] for one in shown]
        rows = torch.tensor([ids + [PAD] * (MOST_ANSWER - len(ids)) for ids in answers])[None]
        logp, there = model.logprobs(questions_tensor([one.text for one in shown])[None], rows)
        decay = 1 - 0.9 * step / scale.warm_steps
        model.update(-logp.sum((1, 2)) / there.sum((1, 2)), 3e-3 * min(1.0, (step + 1) / 20) * decay, torch.ones(1))
    return {name: weight.detach()[0].clone() for name, weight in model.weights.items()}


class Run:
    """The nodes of a cell, and their randomness."""

    def __init__(self, cell: Cell, seed: int, scale: Scale, warm: dict[str, Tensor], training: list[Question]) -> None:
        self.cell, self.scale = cell, scale
        self.nodes = Nodes(scale.shape, scale.nodes, seed=0)
        self.nodes.load(warm)
        self.generator = torch.Generator().manual_seed(seed_for("sapo draws", seed) % 2**62)
        self._rngs = [random.Random(seed_for("sapo", seed, 0 if cell.same else i)) for i in range(scale.nodes)]
        self._taking = random.Random(seed_for("sapo takes", seed))
        self._by_task: dict[str, list[Question]] = {}
        for question in sorted(training, key=lambda one: one.task):
            self._by_task.setdefault(question.task, []).append(question)

    def round(self) -> tuple[list[float], float, float]:
        """Plays one: each node's mean reward in its own groups, how many of these and of peers a node trained with."""
        cell = self.cell
        count = cell.own * (MOST_DRAWN if cell.dynamic else 1)
        drawn = groups_of(
            self.nodes, [self._questions(rng, count) for rng in self._rngs], self.scale.each, self.generator
        )
        trained, external = chosen(cell, drawn, self._taking)
        learn(self.nodes, trained, self.scale.lr, LIKELY if cell.negatives == "likely" else 0.0)
        means = [fmean(fmean(one.rewards) for one in groups[: cell.own]) for groups in drawn]
        return means, cell.own, external / self.scale.nodes

    def _questions(self, rng: random.Random, count: int) -> list[Question]:
        """Of specialties drawn uniformly with replacement."""
        tasks = list(self._by_task)
        return [rng.choice(self._by_task[rng.choice(tasks)]) for _ in range(count)]


def run_cell(
    cell: Cell, seed: int, scale: Scale, warm: dict[str, Tensor], training: list[Question], held_out: list[Question]
) -> Record:
    """The curves of a cell: own reward per round and node, held-out accuracy, groups drawn and taken."""
    run = Run(cell, seed, scale, warm, training)
    rounds, evaluations = [], []
    for number in range(scale.rounds):
        if number % scale.eval_every == 0:
            evaluations.append((number, accuracy(run.nodes, held_out, run.generator)))
        rounds.append(run.round())
    evaluations.append((scale.rounds, accuracy(run.nodes, held_out, run.generator)))
    return {
        "rewards": [[round(value, 4) for value in row] for row, _, _ in rounds],
        "own": [round(own, 3) for _, own, _ in rounds],
        "taken": [round(taken, 3) for _, _, taken in rounds],
        "evaluations": [[number, round(share, 4)] for number, share in evaluations],
        "cumulative": round(sum(sum(row) for row, _, _ in rounds), 2),
    }


def groups_of(nodes: Nodes, asked: list[list[Question]], each: int, generator: torch.Generator) -> list[list[Group]]:
    """Every node's answers to its questions, scored."""
    texts = torch.stack([questions_tensor([one.text for one in questions]) for questions in asked])
    answers = nodes.answers(texts, each, generator)
    result = []
    for questions, rows in zip(asked, answers.split(1), strict=True):
        groups = []
        for question, ids in zip(questions, rows[0].split(each), strict=True):
            marks = [float(END in row and text_of(row) == question.truth) for row in ids.tolist()]
            groups.append(Group(question, ids, marks))
        result.append(groups)
    return result


def chosen(cell: Cell, drawn: list[list[Group]], rng: random.Random) -> tuple[list[list[tuple[Group, bool]]], int]:
    """For each node the groups that it trains, with whether negatives are dropped, and how many of all are peers'."""
    result, external = [], 0
    for me, groups in enumerate(drawn):
        own = groups
        if cell.dynamic:
            own = [one for one in groups if min(one.rewards) < max(one.rewards)][: cell.own]
        others = [(peer, one) for peer, theirs in enumerate(drawn) if peer != me for one in theirs]
        candidates = [
            Candidate(str(peer), one.question.task, tuple(one.rewards), 0.0, 0, 0, 1.0, newcomer=False)
            for peer, one in others
        ]
        picked = [others[i][1] for i in uniform(candidates, cell.external, rng)]
        external += len(picked)
        if cell.shuffled:
            questions = [one.question for one in picked]
            rng.shuffle(questions)
            picked = [replace(one, question=other) for one, other in zip(picked, questions, strict=True)]
        drop = cell.negatives != "keep"
        result.append([(one, False) for one in own] + [(one, drop) for one in picked])
    return result, external


def learn(nodes: Nodes, trained: list[list[tuple[Group, bool]]], lr: float, likely: float = 0.0) -> None:
    """One update per node: the token mean of -A log pi over its groups; groups without advantage only count.

    With `likely`, tokens of peers' groups weigh min(1, p / likely).
    """
    tokens = [max(sum(int((group.answers != PAD).sum()) for group, _ in groups), 1) for groups in trained]
    useful = [[(group, drop) for group, drop in groups if differ(group.rewards)] for groups in trained]
    most = max(len(groups) for groups in useful)
    if not most:
        return
    each = next(len(one.rewards) for groups in useful for one, _ in groups)
    asked, answers, advantage, dropped = [], [], [], []
    for groups in useful:
        blank = most - len(groups)
        asked.append(questions_tensor([group.question.text for group, _ in groups] + [""] * blank))
        answers.append(torch.cat([*(one.answers for one, _ in groups), torch.full((blank * each, MOST_ANSWER), PAD)]))
        scores = [a if a > 0 or not drop else 0.0 for one, drop in groups for a in advantages(one.rewards, "grpo")]
        advantage.append(torch.tensor(scores + [0.0] * (blank * each)))
        dropped.append(torch.tensor([drop for _, drop in groups for _ in range(each)] + [False] * (blank * each)))
    logp, _ = nodes.logprobs(torch.stack(asked), torch.stack(answers))
    if likely:
        weight = torch.where(torch.stack(dropped)[..., None], (logp.detach().exp() / likely).clamp(max=1.0), 1.0)
        logp = logp * weight
    loss_N = -(logp.sum(-1) * torch.stack(advantage)).sum(-1) / torch.tensor(tokens)
    nodes.update(loss_N, lr, torch.tensor([float(bool(groups)) for groups in useful]))


def accuracy(nodes: Nodes, held_out: list[Question], generator: torch.Generator) -> float:
    """Mean over the specialties, all nodes, drawn as in training."""
    found = groups_of(nodes, [held_out] * nodes.nodes, 2, generator)
    marks = sorted((one.question.task, fmean(one.rewards)) for groups in found for one in groups)
    return fmean(fmean(mark for _, mark in same) for _, same in groupby(marks, key=lambda pair: pair[0]))
