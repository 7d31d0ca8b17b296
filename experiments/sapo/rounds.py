"""One cell: N nodes, round after round of drawing, sharing, taking and learning (algorithm 1 of the paper).

Taking and advantages are Shoal's own (`swarm.strategy`, `train.advantage`). All nodes speak the same language, so that
a peer's text has the peer's tokens; the behaviour is the node itself, so that the first and only update of a round has
ratio 1. Externals are of the same round; fewer than J informative ones are fewer.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean

import torch
from torch import Tensor

from experiments.sapo.nodes import END, MOST_ANSWER, PAD, Nodes, Shape, questions_tensor, text_of, token_ids
from experiments.sapo.questions import Question, lesson
from shoal.swarm.strategy import Candidate, informative
from shoal.train.advantage import advantages
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
    negatives: str = "keep"
    """`drop` leaves out peers' answers that came out worse than their group."""

    @classmethod
    def of(cls, name: str) -> "Cell":
        """Of a name such as 6/2, 8/0-dynamic, 4/4-same, 4/4-drop."""
        counts, _, variant = name.partition("-")
        own, external = map(int, counts.split("/"))
        return cls(own, external, variant == "dynamic", variant == "same", "drop" if variant == "drop" else "keep")


@dataclass(frozen=True, slots=True)
class Scale:
    """How large."""

    nodes: int = 8
    rounds: int = 80
    each: int = 8
    """Answers to one question."""
    lr: float = 3e-4
    eval_every: int = 40
    warm_steps: int = 500
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


def run_cell(
    cell: Cell,
    seed: int,
    scale: Scale,
    warm: dict[str, Tensor],
    training: list[Question],
    held_out: list[Question],
    told: Callable[[str], None] = lambda line: None,
) -> dict[str, object]:
    """The curves of a cell: own reward per round and node, held-out accuracy, groups taken."""
    nodes = Nodes(scale.shape, scale.nodes, seed=0)
    nodes.load(warm)
    generator = torch.Generator().manual_seed(seed_for("sapo draws", seed) % 2**62)
    rngs = [random.Random(seed_for("sapo", seed, 0 if cell.same else i)) for i in range(scale.nodes)]
    taking = random.Random(seed_for("sapo takes", seed))
    tasks = sorted({one.task for one in training})
    by_task = {task: [one for one in training if one.task == task] for task in tasks}
    rewards, taken, evaluations = list[list[float]](), list[float](), list[tuple[int, float]]()
    for number in range(scale.rounds):
        if number % scale.eval_every == 0:
            evaluations.append((number, accuracy(nodes, held_out, generator)))
            told(f"round {number}: held out {evaluations[-1][1]:.3f}")
        count = cell.own * (MOST_DRAWN if cell.dynamic else 1)
        asked = [[rng.choice(by_task[rng.choice(tasks)]) for _ in range(count)] for rng in rngs]
        drawn = groups_of(nodes, asked, scale.each, generator)
        rewards.append([fmean(fmean(group.rewards) for group in groups[: cell.own]) for groups in drawn])
        trained, external = chosen(cell, drawn, taking)
        taken.append(external / scale.nodes)
        learn(nodes, trained, scale.lr)
    evaluations.append((scale.rounds, accuracy(nodes, held_out, generator)))
    return {
        "rewards": [[round(value, 4) for value in row] for row in rewards],
        "taken": taken,
        "evaluations": evaluations,
        "cumulative": sum(sum(row) for row in rewards),
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
    """For each node the groups that it trains with whether they are foreign, and how many of all are."""
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
        picked = [others[i][1] for i in informative(candidates, cell.external, rng)] if cell.external else []
        external += len(picked)
        drop = cell.negatives == "drop"
        result.append([(one, False) for one in own] + [(one, drop) for one in picked])
    return result, external


def learn(nodes: Nodes, trained: list[list[tuple[Group, bool]]], lr: float) -> None:
    """One update per node: the token mean of -A log pi over its groups; rows without advantage only count."""
    rows: list[list[tuple[str, Tensor, float]]] = []
    tokens = []
    for groups in trained:
        mine, count = [], 0
        for group, drop in groups:
            count += int((group.answers != PAD).sum())
            for ids, a in zip(group.answers, advantages(group.rewards, "grpo"), strict=True):
                if a > 0 or (a < 0 and not drop):
                    mine.append((group.question.text, ids, a))
        rows.append(mine)
        tokens.append(max(count, 1))
    longest = max(len(mine) for mine in rows)
    if not longest:
        return
    blank = ("", torch.full((MOST_ANSWER,), PAD), 0.0)
    full = [mine + [blank] * (longest - len(mine)) for mine in rows]
    questions = torch.stack([questions_tensor([text for text, _, _ in mine]) for mine in full])
    answers = torch.stack([torch.stack([ids for _, ids, _ in mine]) for mine in full])
    advantage_NB = torch.tensor([[a for _, _, a in mine] for mine in full])
    logp, _ = nodes.logprobs(questions, answers)
    loss_N = -(logp.sum(-1) * advantage_NB).sum(-1) / torch.tensor(tokens)
    nodes.update(loss_N, lr, torch.tensor([float(bool(mine)) for mine in rows]))


def accuracy(nodes: Nodes, held_out: list[Question], generator: torch.Generator) -> float:
    """Mean over the specialties, all nodes, drawn as in training."""
    found = groups_of(nodes, [held_out] * nodes.nodes, 2, generator)
    marks = sorted((one.question.task, fmean(one.rewards)) for groups in found for one in groups)
    return fmean(fmean(mark for _, mark in same) for _, same in groupby(marks, key=lambda pair: pair[0]))
