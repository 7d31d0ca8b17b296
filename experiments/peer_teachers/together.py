"""Nodes of the product in one process: a swarm in memory, and sampler and optimizer of this file.

Node, ingress filter, verification, teaching, taking and credit are the product's; engine, trainer, log and NATS are not
there. So a condition costs a minute of a core.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM

from experiments.grid import Record
from experiments.peer_teachers.nodes import Condition
from experiments.sapo.node import Scale, task_configs
from experiments.sapo.warm import POOL, pools_of
from shoal.config import Config, SwarmConfig, TaskConfig
from shoal.config.training import TrainConfig
from shoal.model.chat_template import ChatRenderer
from shoal.model.loading import load_model
from shoal.model.packed import packed_outputs
from shoal.model.renderer_loading import load_renderer
from shoal.net.identity import Identity
from shoal.swarm.claim_verification import OwnTasks
from shoal.swarm.exchange import MemorySwarm
from shoal.swarm.external import external_rows
from shoal.swarm.node import Node
from shoal.swarm.peer import Joined
from shoal.tasks.jsonl import JsonlService
from shoal.tasks.library import Library
from shoal.trainer.advantage import step_samples
from shoal.types import Completion, FinishReason, Group, Message, Reward, Role, Rollout, Split, Task, Turn, seed_for

MOST_TOKENS = 10
CREDIT = "skill_drop"


class Exact:
    """A `Scorer` that compares."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        """1 for the exact truth."""
        return [Reward(float(answer == task.answer)) for answer in answers]


class Student:
    """A model with its tokenizer and optimizer."""

    def __init__(self, folder: Path, seed: int, lr: float) -> None:
        renderer = load_renderer(folder)
        assert isinstance(renderer, ChatRenderer)
        self.model, self.renderer = load_model(folder), renderer
        self._sampler = AutoModelForCausalLM.from_pretrained(folder)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)
        self._generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def said(self, tasks: Sequence[Task], each: int) -> list[list[list[int]]]:
        """Token ids of sampled answers to each task, with the stop token where it came."""
        self._sampler.load_state_dict(self.model.state_dict())
        prompts = [self.renderer.prompt_ids(task.messages) for task in tasks for _ in range(each)]
        longest, stop = max(map(len, prompts)), self.renderer.stop_token_ids[0]
        ids = torch.tensor([[stop] * (longest - len(one)) + one for one in map(list, prompts)])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        done = torch.zeros(len(prompts), dtype=torch.bool)
        rows: list[list[int]] = [[] for _ in prompts]
        for _ in range(MOST_TOKENS):
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logits = self._sampler(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=self._generator)
            for row, token, over in zip(rows, drawn[:, 0].tolist(), done.tolist(), strict=True):
                if not over:
                    row.append(token)
            done |= drawn[:, 0] == stop
            if bool(done.all()):
                break
            ids, mask = torch.cat([ids, drawn], 1), torch.cat([mask, torch.ones_like(drawn)], 1)
        return [rows[i : i + each] for i in range(0, len(rows), each)]

    async def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Nats of every token of each row but the first."""
        return [one.tolist() for one in self._logp(rows)] if rows else []

    def _logp(self, rows: Sequence[Sequence[int]], *, grad: bool = False) -> list[torch.Tensor]:
        lengths = [len(row) for row in rows]
        starts = [sum(lengths[:i]) for i in range(len(rows))]
        at = torch.tensor([start + i for start, n in zip(starts, lengths, strict=True) for i in range(1, n)])
        with torch.set_grad_enabled(grad):
            logp_N = packed_outputs(self.model, torch.tensor([t for row in rows for t in row]), lengths, at=at).logp_N
        return list(logp_N.split([n - 1 for n in lengths]))

    def groups(self, tasks: Sequence[Task], each: int, version: int) -> list[Group]:
        """Sampled and scored groups."""
        found, stop = [], self.renderer.stop_token_ids[0]
        for task, answers in zip(tasks, self.said(tasks, each), strict=True):
            prompt = tuple(self.renderer.prompt_ids(task.messages))
            logps = self._logp([[*prompt, *answer] for answer in answers])
            rollouts = []
            for i, (answer, logp) in enumerate(zip(answers, logps, strict=True)):
                ended = answer[-1] == stop
                text = self.renderer.text(answer[:-1] if ended else answer)
                reason = FinishReason.STOP if ended else FinishReason.LENGTH
                drawn = Completion(
                    tuple(answer), tuple(logp[len(prompt) - 1 :].tolist()), (version,) * len(answer), reason
                )
                messages = (*task.messages, Message(Role.ASSISTANT, text))
                reward = Reward(float(ended and text == task.answer))
                rollouts.append(Rollout(f"{task.id}#{version}#{i}", messages, (Turn(prompt, drawn),), reward))
            found.append(Group(f"{task.id}#{version}", task, tuple(rollouts), version))
        return found

    def learn(self, groups: Sequence[Group]) -> None:
        """One update: the token mean of -A log pi."""
        samples = step_samples(groups, TrainConfig(), MOST_TOKENS)
        rows = [
            row
            for group, own in zip(groups, samples, strict=True)
            for row in (external_rows(group, own, CREDIT) if group.external else own)
        ]
        total, loss = sum(sum(row.mask) for row in rows), torch.zeros(())
        useful = [row for row in rows if any(row.advantages)]
        if not useful:
            return
        for row, logp in zip(useful, self._logp([row.tokens for row in useful], grad=True), strict=True):
            loss = loss - (logp * torch.tensor(row.advantages[1:])).sum()
        self._optimizer.zero_grad()
        (loss / total).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    def accuracy(self, held_out: Sequence[Sequence[Task]]) -> list[float]:
        """Share of right sampled answers, by task."""
        stop = self.renderer.stop_token_ids[0]
        return [
            round(
                fmean(
                    one[-1] == stop and self.renderer.text(one[:-1]) == task.answer
                    for task, (one,) in zip(tasks, self.said(tasks, 1), strict=True)
                ),
                4,
            )
            for tasks in held_out
        ]


async def run_together(folder: Path, models: dict[str, Path], condition: Condition, seed: int, scale: Scale) -> Record:
    """Trains a node for each specialty; the record has the form of real nodes'."""
    torch.manual_seed(seed)
    configs = [next(one for one in task_configs() if one.name == name) for name in models]
    with Library(configs, 0) as library:
        each = max(1, scale.questions // len(models))
        held_out = [[service.draw(Split.EVAL, i) for i in range(each)] for service in library.services]
    services = [_service(folder, name, pool, seed) for name, pool in zip(models, pools_of(configs, POOL), strict=True)]
    students = [
        Student(model, seed_for("student", seed, i) % 2**62, scale.lr) for i, model in enumerate(models.values())
    ]
    hub, nodes = MemorySwarm(), []
    swarm = SwarmConfig(
        external_groups=condition.external,
        round_offers=condition.own * (len(models) - 1),
        share="all",
        take="uniform",
        credit=CREDIT,
        teach=condition.teach,
        wait_s=600.0,
        fresh_s=3600.0,
    )
    config = Config(seed=seed, tasks=[TaskConfig(name=name) for name in models], swarm=swarm)
    if condition.external:
        for i, student in enumerate(students):
            joined = Joined(hub.join(), OwnTasks(services), Identity.fresh(), folder / f"node-{i}", config)
            nodes.append(Node(joined, Exact(), student.renderer, 256))
    running = [asyncio.ensure_future(node.run()) for node in nodes]
    curves: list[list[list[float]]] = [[] for _ in students]
    external = [0] * len(students)
    for step in range(scale.rounds + 1):
        if step % (scale.every or scale.rounds) == 0 or step == scale.rounds:
            for curve, student in zip(curves, students, strict=True):
                curve.append([step, *student.accuracy(held_out)])
        if step == scale.rounds:
            break
        own = []
        for i, student in enumerate(students):
            first = condition.own * (step * len(students) + i)
            tasks = [
                services[k % len(services)].draw(Split.TRAIN, k // len(services))
                for k in range(first, first + condition.own)
            ]
            own.append(student.groups(tasks, scale.each, step))
        for node, groups in zip(nodes, own, strict=False):
            for group in groups:
                node.offer(group)
        for i, student in enumerate(students):
            taken = []
            if nodes:
                nodes[i].choose()
                taken = await nodes[i].take(step, student.logprobs)
                nodes[i].stepped(own[i], taken)
            external[i] += len(taken)
            student.learn([*own[i], *taken])
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return {
        "families": list(models),
        "curves": curves,
        "external": external,
        "lessons": [node.tally.lessons for node in nodes],
        "scored": [node.tally.scored for node in nodes],
    }


def _service(folder: Path, name: str, pool: Sequence[Task], seed: int) -> JsonlService:
    """The training questions of a specialty, each once, as a file's."""
    asked = {task.messages[-1].content: task.answer for task in pool}
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text, "answer": answer}) for text, answer in asked.items()))
    return JsonlService(TaskConfig(name=name, service="jsonl", path=str(path), scorer="exact", eval_share=0.02), seed)
