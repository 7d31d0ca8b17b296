"""Peers as teachers: what a better node's model makes of a node's own answers, and what the node learns from it."""

import asyncio
import hashlib
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import torch

from shoal import wire
from shoal.config import Config, SwarmConfig, TaskConfig
from shoal.config.training import TrainConfig
from shoal.errors import ConfigError, WireError
from shoal.model.chat_template import ChatRenderer
from shoal.model.loading import load_model
from shoal.model.packed import packed_outputs
from shoal.model.renderer_loading import load_renderer
from shoal.model.spans import MOST_NATS, span_advantages
from shoal.net.identity import Identity
from shoal.run.demo_model.architecture import Shape, character_tokenizer, pair_tokenizer, save, untrained
from shoal.swarm.claim_verification import OwnTasks
from shoal.swarm.encoding import encode_offer
from shoal.swarm.exchange import MemorySwarm
from shoal.swarm.external import external_rows
from shoal.swarm.node import Node
from shoal.swarm.offer import Course, OfferedRollout, ScoredAnswer, Scores
from shoal.swarm.peer import Joined
from shoal.swarm.teaching import MEASURED, Teaching
from shoal.swarm.trust import Reason, VerifiedMessage
from shoal.tasks.jsonl import JsonlService
from shoal.trainer.advantage import step_samples
from shoal.types import Completion, FinishReason, Group, Message, Reward, Role, Rollout, Split, Task, Turn
from until import until

NOW_S = 1.8e9
SHAPE = Shape(16, 1, 2, 32, 128, 1000.0)
LEARNERS = ("there is an anther", "the end", "renter", "no")


class ExactScorer:
    """A `Scorer` that compares."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        return [Reward(float(answer == task.answer)) for answer in answers]


class Model:
    """A tiny model with its tokenizer: what trainer and engine of a node have."""

    def __init__(self, folder: Path, *, pairs: bool, seed: int) -> None:
        tokenizer = pair_tokenizer() if pairs else character_tokenizer()
        save(untrained(SHAPE, seed, tokenizer), folder, tokenizer)
        self.model, renderer = load_model(folder), load_renderer(folder)
        assert isinstance(renderer, ChatRenderer)
        self.renderer = renderer

    async def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Nats of every token of each row but the first."""
        found = []
        for row in rows:
            with torch.no_grad():
                at = torch.arange(1, len(row))
                logp_N = packed_outputs(self.model, torch.tensor(row), [len(row)], at=at).logp_N
            found.append([float(value) for value in logp_N])
        return found

    def said(self, task: Task, texts: Sequence[str]) -> Group:
        """Answers as this node would have sampled them, the right one with a reward."""
        asked, stop = tuple(self.renderer.prompt_ids(task.messages)), self.renderer.stop_token_ids[0]
        rollouts = []
        for i, text in enumerate(texts):
            ids = (*self.renderer.token_ids(text), stop)
            turn = Turn(asked, Completion(ids, (-1.0,) * len(ids), (0,) * len(ids), FinishReason.STOP))
            messages = (*task.messages, Message(Role.ASSISTANT, text))
            rollouts.append(Rollout(f"{task.id}#{i}", messages, (turn,), Reward(float(text == task.answer))))
        return Group(task.id, task, tuple(rollouts), 0)

    async def spelt(self, task: Task, text: str) -> float:
        """Log-likelihood of a whole answer, its end included."""
        asked, stop = self.renderer.prompt_ids(task.messages), self.renderer.stop_token_ids[0]
        (row,) = await self.logprobs([[*asked, *self.renderer.token_ids(text), stop]])
        return math.fsum(row[len(asked) - 1 :])


def service_in(folder: Path) -> JsonlService:
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"say {c * 3}", "answer": c * 3}) for c in "abcdefghijklmnop"))
    letters = TaskConfig(name="letters", service="jsonl", path=str(data), scorer="exact", eval_share=0.1)
    return JsonlService(letters, 0)


def node_in(folder: Path, service: JsonlService, hub: MemorySwarm, model: Model, *, teach: bool = True) -> Node:
    swarm = SwarmConfig(external_groups=4, take="uniform", teach=teach)
    config = Config(tasks=[TaskConfig(name="letters")], swarm=swarm)
    joined = Joined(hub.join(), OwnTasks([service]), Identity.fresh(), folder, config, clock=lambda: NOW_S)
    return Node(joined, ExactScorer(), model.renderer, 128)


async def with_nodes(nodes: Sequence[Node], act: Callable[[], Awaitable[None]]) -> None:
    running = [asyncio.ensure_future(node.run()) for node in nodes]
    try:
        await act()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def test_a_node_learns_from_the_scores_of_a_better_one_whose_tokens_are_others(tmp_path: Path) -> None:
    service, hub = service_in(tmp_path), MemorySwarm()
    teacher, learner = Model(tmp_path / "t", pairs=True, seed=1), Model(tmp_path / "l", pairs=False, seed=2)
    best, worse = (
        node_in(tmp_path / f"node-{name}", service, hub, one) for name, one in (("t", teacher), ("l", learner))
    )
    tasks = [service.draw(Split.TRAIN, i) for i in range(4)]

    async def act() -> None:
        for task in tasks[:3]:  # enough of them to measure the teacher's skill
            best.offer(teacher.said(task, [task.answer or "", "?"]))
        await until(lambda: worse.ready == 3)
        worse.offer(learner.said(tasks[3], LEARNERS))
        await until(lambda: best.ingress.admitted == 1 and best.status()["pending"] == 0)
        while not worse.tally.lessons:
            await best.take(0, teacher.logprobs)  # the teacher's next step scores what came
            await asyncio.sleep(0)
            worse.choose()
            groups = await worse.take(0, learner.logprobs)
        assert worse.tally.lessons == best.tally.scored == 1
        (lesson,) = [group for group in groups if group.task == tasks[3]]
        assert lesson.origin is not None
        assert lesson.origin.peer_id == best.peer_id
        rows = external_rows(lesson, step_samples([lesson], TrainConfig(), 64)[0], "group_drop")
        less = []
        for text, rollout, row in zip(LEARNERS, lesson.finished, rows, strict=True):
            assert rollout.external is not None
            assert rollout.turns[0].completion.token_ids[:-1] == tuple(learner.renderer.token_ids(text))
            assert len(rollout.external.advantages) == sum(row.mask) == len(text) + 1
            assert tuple(a for a, sampled in zip(row.advantages, row.mask, strict=True) if sampled) == (
                rollout.external.advantages
            )
            ends = list(range(1, len(text) + 1))
            common = [e for e in ends if e in ends_of(teacher.renderer, text)]
            per_span = [rollout.external.advantages[end - 1] for end in common] + [rollout.external.advantages[-1]]
            assert max(map(abs, per_span)) < MOST_NATS
            difference = await teacher.spelt(tasks[3], text) - await learner.spelt(tasks[3], text)
            less.append((difference - math.fsum(per_span)) / len(per_span))
        assert less == pytest.approx(less[:1] * len(less), abs=1e-3)  # all spans less the same number: their mean
        assert math.fsum(sum(row.advantages) for row in rows) == pytest.approx(0.0, abs=1e-3)

    asyncio.run(with_nodes([best, worse], act))


def ends_of(renderer: ChatRenderer, text: str) -> list[int]:
    """Characters of an ASCII text at which tokens end."""
    found = [0]
    for token in renderer.token_ids(text):
        found.append(found[-1] + len(renderer.text([token])))
    return found[1:]


def test_the_teacher_is_whoever_was_measured_best_and_nobody_who_is_no_better(tmp_path: Path) -> None:
    task = service_in(tmp_path).draw(Split.TRAIN, 0)
    model = Model(tmp_path / "m", pairs=False, seed=1)
    group = model.said(task, ["no", "never"])
    source, _ = encode_offer([(OfferedRollout(one), Course()) for one in ("no", "never")], task, model.renderer, 128)
    scoring, learning = (Teaching(name, model.renderer.token_bytes, 4) for name in ("some teacher", "learner"))
    scoring.measure("learner", "?", source, [Reward(0.0)], own=1.0)
    (asked,) = scoring.asked()
    scores = scoring.scores(asked, iter(asyncio.run(model.logprobs(source.rows))))
    assert scores is not None

    def hear(author: str) -> Reason | None:
        message = VerifiedMessage(author, f"{author}/1-0", NOW_S, scores)
        return learning.hear(message, scores, {task.service: 0.5}.get)

    learning.share("?", group)
    skills = {"worse": 0.4, "good": 0.7, "best": 0.9, "late": 0.8, "unmeasured": 1.0}
    for author, skill in skills.items():
        for _ in range(1 if author == "unmeasured" else MEASURED):
            learning.measure(author, "?", source, [Reward(skill)], own=None)
    assert hear("worse") is hear("unmeasured") is hear("stranger") is Reason.NO_BETTER
    assert hear("good") is hear("best") is None
    assert hear("late") is Reason.NO_BETTER
    (lesson,) = learning.take(4, set())
    assert (lesson.teacher, len(lesson.scores)) == ("best", 2)
    assert hear("best") is None
    assert learning.take(4, set()) == []  # a group is taught once
    learning.share("?", group)
    assert hear("best") is None
    assert learning.take(4, {"best"}) == []


def test_scores_of_another_text_or_of_a_part_of_it_are_refused(tmp_path: Path) -> None:
    task = service_in(tmp_path).draw(Split.TRAIN, 0)
    model = Model(tmp_path / "m", pairs=False, seed=1)
    learning = Teaching("learner", model.renderer.token_bytes, 4)
    learning.share("?", model.said(task, ["no"]))
    source, _ = encode_offer([(OfferedRollout("no"), Course())], task, model.renderer, 128)
    for _ in range(MEASURED):
        learning.measure("best", "?", source, [Reward(1.0)], own=None)
    key, text = (hashlib.blake2b(one, digest_size=16).digest() for one in (b"learner\x1e?", b"no"))
    for answer, ends, logprobs in (
        (key, (2,), (-1.0, -1.0)),
        (text, (1,), (-1.0, -1.0)),
        (text, (2, 1, 2), (-1.0,) * 4),
        (text, (2,), (-1.0,)),
        (text, (), (-1.0,)),
    ):
        scores = Scores(key, (ScoredAnswer(answer, ends, logprobs),))
        message = VerifiedMessage("best", "best/1-0", NOW_S, scores)
        assert learning.hear(message, scores, {task.service: 0.5}.get) is Reason.UNREADABLE
    with pytest.raises(WireError):
        wire.decode(wire.encode(Scores(key, (ScoredAnswer(text, (2,), (1.0, math.nan)),))), Scores, 1 << 16)


def test_scores_that_forbid_nearly_all_of_a_node_s_answers_are_no_lesson(tmp_path: Path) -> None:
    task = service_in(tmp_path).draw(Split.TRAIN, 0)
    model = Model(tmp_path / "m", pairs=False, seed=1)
    learning = Teaching("learner", model.renderer.token_bytes, 4)
    learning.share("?", model.said(task, ["no"]))
    source, _ = encode_offer([(OfferedRollout("no"), Course())], task, model.renderer, 128)
    for _ in range(MEASURED):
        learning.measure("best", "?", source, [Reward(1.0)], own=None)
    key, text = (hashlib.blake2b(one, digest_size=16).digest() for one in (b"learner\x1e?", b"no"))
    for logprobs, found in (((-9.0, -9.0, -9.0), Reason.FORBIDDEN), ((-9.0, -3.0, -1.0), None)):
        scores = Scores(key, (ScoredAnswer(text, (1, 2), logprobs),))
        message = VerifiedMessage("best", "best/1-0", NOW_S, scores)
        assert learning.hear(message, scores, {task.service: 0.5}.get) is found
    assert learning.ready == 1


def test_a_span_counts_once_and_no_teacher_says_more_than_its_bound() -> None:
    assert span_advantages((1, 2, 3), (-1.0, -1.0, -2.0, -0.5), (1, 3), (-0.5, -1.0, -0.25)) == (0.5, 2.0, 2.0, 0.25)
    assert span_advantages((2,), (-0.1,), (2,), (-1e4,)) == (-MOST_NATS,)
    assert span_advantages((), (-1.0,), (), (-0.5,)) == (0.5,)  # nothing but the end


def test_a_node_without_groups_of_peers_cannot_be_taught(tmp_path: Path) -> None:
    service, model = service_in(tmp_path), Model(tmp_path / "m", pairs=False, seed=1)
    config = Config(tasks=[TaskConfig(name="letters")], swarm=SwarmConfig(teach=True))
    joined = Joined(MemorySwarm().join(), OwnTasks([service]), Identity.fresh(), tmp_path, config)
    with pytest.raises(ConfigError, match=r"swarm\.teach"):
        Node(joined, ExactScorer(), model.renderer, 128)
