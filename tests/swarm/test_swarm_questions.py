"""Questions of peers without a receipt: which checkers a node takes, and what of them."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.memory_swarm import MemorySwarm
from shoal import wire
from shoal.checker import Code, task_spec
from shoal.config import Config, RewardConfig, SwarmConfig, TaskConfig
from shoal.model.renderer_loading import load_renderer
from shoal.net.identity import Identity
from shoal.reward.service import RewardService
from shoal.swarm.node import Node
from shoal.swarm.peer import Joined
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.trust.limits import USUAL, QuestionLimits
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.envelope import Signer
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout
from shoal.tasks.jsonl import JsonlService
from shoal.types import Split, Task

ALL = ["exact", "number", "math", "regex", "code"]


def service(folder: Path, name: str, scorer: object, **columns: object) -> JsonlService:
    file = folder / f"{name}.jsonl"
    rows = [{"prompt": f"{name} {i}", "answer": f"{i}", **columns} for i in range(12)]
    file.write_text("\n".join(map(json.dumps, rows)))
    config = {"name": name, "service": "jsonl", "path": str(file), "scorer": scorer}
    return JsonlService(TaskConfig.model_validate(config), 0)


def decided(
    claim: Claim, own: Sequence[JsonlService] = (), limits: QuestionLimits = USUAL, **settings: object
) -> Task | Reason:
    tasks = OwnTasks(own, SwarmConfig.model_validate(settings), limits=limits)
    found = asyncio.run(tasks.task(claim))
    tasks.close()
    return found


@pytest.mark.parametrize("scorer", ["exact", "number", "math", {"name": "regex", "pattern": "[0-9]+"}])
def test_a_question_is_taken_with_the_checkers_that_the_node_lists(tmp_path: Path, scorer: object) -> None:
    theirs = service(tmp_path, "theirs", scorer)
    name = scorer if isinstance(scorer, str) else "regex"
    task = theirs.draw(Split.TRAIN, 0)
    claim = asyncio.run(OwnTasks([theirs]).claim(task))
    assert decided(claim) is Reason.UNKNOWN_TASK
    assert decided(claim, checkers=[one for one in ALL if one != name]) is Reason.UNKNOWN_TASK
    found = decided(claim, checkers=[name])
    assert isinstance(found, Task)
    assert (found.messages, found.answer, task_spec(found)) == (task.messages, task.answer, task_spec(task))
    assert found.service == f"questions_{name}"
    assert decided(claim, checkers=[name], limits=QuestionLimits(characters=5)) is Reason.OUT_OF_BOUNDS


def test_no_code_model_or_size_of_a_peer_gets_in(tmp_path: Path) -> None:
    claim = Claim("x", "q?", "a", checker=json.dumps({"scorer": "exact"}))
    evil = [
        {"name": "function", "path": "os:system"},
        {"name": "judge", "url": "http://127.0.0.1", "model": "m", "rubric": "r"},
        {"name": "weighted", "parts": [{"scorer": {"name": "function", "path": "os:system"}}]},
        {"name": "weighted", "parts": [{"scorer": "exact"}]},
        {"name": "regex", "pattern": "("},
        {"name": "nothing"},
        17,
    ]
    for scorer in evil:
        assert decided(replace(claim, checker=json.dumps({"scorer": scorer})), checkers=ALL) is Reason.UNKNOWN_TASK
    for text in ("", "{", "[" * 10_000, "[]", "{}", '{"scorer": "code"}', '{"scorer": "code", "tests": 3}'):
        assert decided(replace(claim, checker=text), checkers=ALL) is Reason.UNKNOWN_TASK
    assert decided(replace(claim, truth=None), checkers=ALL) is Reason.UNKNOWN_TASK
    greedy = {"scorer": {"name": "code", "timeout_s": 1e9, "memory_mb": 10**9}, "tests": [{"code": "assert f() == 1"}]}
    found = decided(replace(claim, checker=json.dumps(greedy)), checkers=ALL)
    assert isinstance(found, Task)
    assert task_spec(found) == Code()
    mine = service(tmp_path, "mine", "exact")
    held_out = mine.tasks(Split.EVAL)[0]
    asked = replace(claim, question=held_out.messages[-1].content, truth=held_out.answer)
    assert decided(asked, [mine], checkers=ALL) is Reason.HELD_OUT


async def logprobs(rows: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[-1.0] * (len(row) - 1) for row in rows]


def test_a_truth_that_its_own_checker_refuses_is_no_truth(tmp_path: Path, tiny_model_dir: Path) -> None:
    async def main() -> None:
        hub, peer = MemorySwarm(), Identity.fresh()
        settings = SwarmConfig(external_groups=4, take="uniform", checkers=["number"])
        config = Config(tasks=[TaskConfig(name="gcd")], swarm=settings)
        own = OwnTasks([], settings)
        async with RewardService(RewardConfig()) as scorer:
            joined = Joined(hub.join(), own, Identity.fresh(), tmp_path, config)
            node = Node(joined, scorer, load_renderer(tiny_model_dir), 256)
            running, seal = asyncio.ensure_future(node.run()), Signer(peer, "reef", session=1)
            for question, truth in (("3 + 4?", "7"), ("3 + 5?", "no number")):
                claim = Claim("sums", question, truth, checker='{"scorer": "number"}')
                said = (OfferedRollout("7"), OfferedRollout("no"))
                made = Offer(claim, said, GeneratorKind.FROZEN, "m", time.time())
                frame = seal.frame(wire.encode(made), time.time())
                await hub.join().publish(peer.peer_id, frame)
            async with asyncio.timeout(60):
                while node.ready != 1 or node.ingress.refused[Reason.UNSCORED] != 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            (group,) = await node.take(0, logprobs)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        own.close()
        assert [one.reward.value for one in group.rollouts] == [1.0, 0.0]
        assert group.task.messages[-1].content == "3 + 4?"

    asyncio.run(main())
