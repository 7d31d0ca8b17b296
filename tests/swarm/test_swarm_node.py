"""What a node gives: its own groups as offers, and its weak tasks as wants."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from chat_templates import ANSWERING, renderer_of
from shoal.config import Config, SwarmConfig, TaskConfig
from shoal.swarm.claim_verification import OwnTasks
from shoal.swarm.exchange import MemorySwarm
from shoal.swarm.identity import Identity
from shoal.swarm.node import NEED_DECAY, Node
from shoal.swarm.offer import GeneratorKind, Offer, OfferedRollout, Want
from shoal.swarm.peer import Joined
from shoal.swarm.trust import IngressFilter, VerifiedMessage
from shoal.tasks.jsonl import JsonlService
from shoal.types import Completion, FinishReason, Group, Message, Reward, Role, Rollout, Split, Task, Turn
from until import until

NOW_S = 1.8e9


class ExactScorer:
    """A `Scorer` that compares."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        return [Reward(float(answer == task.answer)) for answer in answers]


def rolled_out(task: Task, said: dict[str, float], reason: FinishReason = FinishReason.STOP) -> Group:
    """A group of this node: texts with their rewards."""
    turn = Turn((1,), Completion((2,), (-0.5,), (0,), reason))
    rollouts = [
        Rollout(text, (*task.messages, Message(Role.ASSISTANT, text)), (turn,), Reward(value))
        for text, value in said.items()
    ]
    return Group("g", task, tuple(rollouts), 0)


def test_own_groups_become_offers_as_the_taker_needs_them_and_what_they_lack_a_want(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"say {c}", "answer": c}) for c in "abcdefghijkl"))
    letters = TaskConfig(name="letters", service="jsonl", path=str(data), scorer="exact", eval_share=0.4)
    service, hub = JsonlService(letters, 0), MemorySwarm()
    config = Config(tasks=[letters], swarm=SwarmConfig(external_groups="adaptive", share="all"))
    joined = Joined(hub.join(), OwnTasks([service]), Identity.fresh(), tmp_path, config, clock=lambda: NOW_S)
    node = Node(joined, ExactScorer(), renderer_of(ANSWERING["qwen3"]), 256)
    first, second = (service.draw(Split.TRAIN, i) for i in range(2))

    async def main() -> None:
        node.offer(rolled_out(first, {"?": 0.0, first.answer or "": 1.0}))
        node.offer(rolled_out(second, {second.answer or "": 1.0}, FinishReason.LENGTH))
        running = asyncio.ensure_future(node.run())
        await until(lambda: len(hub.frames) == 3)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    ingress = IngressFilter("reef", "")
    heard = [ingress.admit(frame, NOW_S) for frame in hub.frames.values()]
    said = [one.content for one in heard if isinstance(one, VerifiedMessage)]
    one, other = (content for content in said if isinstance(content, Offer))
    assert (one.claim.truth, one.generator, one.made_s) == (first.answer, GeneratorKind.TRAINING, NOW_S)
    assert one.rollouts == (OfferedRollout("?"), OfferedRollout(first.answer or ""))
    assert other.rollouts == (OfferedRollout(second.answer or "", complete=False),)
    lacks = 1 - (NEED_DECAY * 0.5 + (1 - NEED_DECAY) * 1.0)
    assert [content for content in said if isinstance(content, Want)] == [Want((("letters", round(lacks, 3)),))]
