"""What a node gives: its own groups as offers."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.memory_swarm import MemorySwarm
from chat_templates import ANSWERING, renderer_of
from shoal import wire
from shoal.config import Config, SwarmConfig, TaskConfig
from shoal.errors import ConfigError
from shoal.net.identity import Identity
from shoal.rehearsal.clock import run_virtual
from shoal.swarm.node import STATUS_PEERS, Node
from shoal.swarm.peer import Joined
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.trust.ingress import IngressFilter, Reason, VerifiedMessage
from shoal.swarm.wire.envelope import Signer
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout
from shoal.tasks.jsonl import JsonlService
from shoal.types import Completion, FinishReason, Group, Message, Reward, Role, Rollout, Split, Task, Turn
from until import until

NOW_S = 1.8e9


class ExactScorer:
    """A `Scorer` that compares."""

    calls = 0

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        self.calls += 1
        return [Reward(float(answer == task.answer)) for answer in answers]


def rolled_out(task: Task, said: dict[str, float], reason: FinishReason = FinishReason.STOP) -> Group:
    """A group of this node: texts with their rewards."""
    turn = Turn((1,), Completion((2,), (-0.5,), (0,), reason))
    rollouts = [
        Rollout(text, (*task.messages, Message(Role.ASSISTANT, text)), (turn,), Reward(value))
        for text, value in said.items()
    ]
    return Group("g", task, tuple(rollouts), 0)


def made(
    folder: Path, service: JsonlService, config: Config, hub: MemorySwarm, scorer: ExactScorer | None = None
) -> Node:
    joined = Joined(hub.join(), OwnTasks([service]), Identity.fresh(), folder, config, clock=lambda: NOW_S)
    return Node(joined, scorer or ExactScorer(), renderer_of(ANSWERING["qwen3"]), 256)


def letters_in(folder: Path) -> TaskConfig:
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"say {c}", "answer": c}) for c in "abcdefghijklmnopqrst"))
    return TaskConfig(name="letters", service="jsonl", path=str(data), scorer="exact", eval_share=0.4)


async def offered(hub: MemorySwarm, node: Node, task: Task, *wrong: str) -> None:
    """A stranger offers the truth of a task and these answers."""
    author, claim = Identity.fresh(), await node._own.claim(task)
    answers = tuple(OfferedRollout(text) for text in (task.answer or "", *wrong))
    offer = wire.encode(Offer(claim, answers, GeneratorKind.FROZEN, "model", NOW_S))
    hub.put(author.peer_id, Signer(author, "reef", 1).frame(offer, NOW_S))


def test_own_groups_become_offers_as_the_taker_needs_them(tmp_path: Path) -> None:
    letters = letters_in(tmp_path)
    service, hub = JsonlService(letters, 0), MemorySwarm()
    config = Config(tasks=[letters], swarm=SwarmConfig(external_groups=3, share="all"))
    node = made(tmp_path, service, config, hub)
    first, second = (service.draw(Split.TRAIN, i) for i in range(2))

    async def main() -> None:
        node.offer(rolled_out(first, {"?": 0.0, first.answer or "": 1.0}))
        node.offer(rolled_out(second, {second.answer or "": 1.0}, FinishReason.LENGTH))
        running = asyncio.ensure_future(node.run())
        await until(lambda: len(hub.frames) == 2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    ingress = IngressFilter("reef", "")
    heard = [ingress.admit(frame, NOW_S) for _, frame in hub.frames.values()]
    one, other = (message.content for message in heard if isinstance(message, VerifiedMessage))
    assert (one.claim.truth, one.generator, one.made_s) == (first.answer, GeneratorKind.TRAINING, NOW_S)
    assert one.rollouts == (OfferedRollout("?"), OfferedRollout(first.answer or ""))
    assert other.rollouts == (OfferedRollout(second.answer or "", complete=False),)


def test_the_status_lists_a_bounded_number_of_peers_the_most_taken_first(tmp_path: Path) -> None:
    letters = letters_in(tmp_path)
    node = made(tmp_path, JsonlService(letters, 0), Config(tasks=[letters]), MemorySwarm())
    peers = [f"peer-{i}" for i in range(STATUS_PEERS + 9)]
    for peer_id in peers:
        node.ingress.praise(peer_id)
    node.verification.pool.uses.update((peer_id, 1) for peer_id in peers[-5:])
    listed = node.status()
    assert listed["known_peers"] == len(peers)
    assert isinstance(shown := listed["peers"], dict)
    assert list(shown) == [*peers[-5:], *peers[: STATUS_PEERS - 5]]
    assert 0 < shown[peers[0]]["trust"] == round(node.ingress.trust(peers[0]), 3) < 1


def test_peers_of_an_invitation_and_of_known_txt_are_established_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters, (named, kept) = letters_in(tmp_path), ("0" * 32, "1" * 32)
    monkeypatch.setenv("SHOAL_SWARM_KNOWN", f"{named},")
    (tmp_path / "known.txt").write_text(f"{kept}\n")
    config = Config(tasks=[letters])
    assert made(tmp_path, JsonlService(letters, 0), config, MemorySwarm()).ingress.established == (named, kept)
    monkeypatch.setenv("SHOAL_SWARM_KNOWN", "a peer")
    with pytest.raises(ConfigError, match=r"SHOAL_SWARM_KNOWN: expected ids of 32 hex.*got 'a peer'"):
        made(tmp_path, JsonlService(letters, 0), config, MemorySwarm())


@pytest.mark.parametrize(("take", "least", "most"), [("uniform", 4, 4), ("trusted", 1, 2)])
def test_uniform_has_no_cap_on_newcomers_and_a_step_waits_for_its_groups(
    tmp_path: Path, take: str, least: int, most: int
) -> None:
    letters = letters_in(tmp_path)
    service, hub, scorer = JsonlService(letters, 0), MemorySwarm(), ExactScorer()
    config = Config(tasks=[letters], swarm=SwarmConfig(external_groups=4, take=take, wait_s=60.0))
    node = made(tmp_path, service, config, hub, scorer)
    node.verification.newcomer_rest = 0.0  # of `trusted`: here its share counts, not its pace
    tasks = [task for _, task in zip(range(4), service.tasks(Split.TRAIN), strict=False)]

    async def main() -> None:
        running = asyncio.ensure_future(node.run())
        taking = asyncio.ensure_future(node.take(0, logprobs))  # nothing is there yet
        for task in tasks:
            assert not taking.done()
            await offered(hub, node, task, "?")
        groups = await taking
        assert least <= len(groups) <= most
        assert node.tally.missing == 4 - len(groups)
        assert scorer.calls == 4  # a checker that no answer can keep busy gets a group at once
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize(("take", "groups"), [("uniform", 2), ("trusted", 1)])
async def test_answers_given_before_are_refused_but_by_a_node_that_takes_by_chance(
    tmp_path: Path, take: str, groups: int
) -> None:
    letters = letters_in(tmp_path)
    service, hub = JsonlService(letters, 0), MemorySwarm()
    node = made(tmp_path, service, Config(tasks=[letters], swarm=SwarmConfig(external_groups=4, take=take)), hub)
    node.verification.newcomer_rest = 0.0
    task = next(iter(service.tasks(Split.TRAIN)))

    running = asyncio.ensure_future(node.run())
    for _ in range(2):
        await offered(hub, node, task, "?")
    await until(lambda: node.ready + node.ingress.refused[Reason.REPEATED] == 2)
    assert node.ready == groups
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_round_is_all_offers_of_it_and_nothing_of_the_round_before(tmp_path: Path) -> None:
    letters = letters_in(tmp_path)
    service, hub = JsonlService(letters, 0), MemorySwarm()
    swarm = SwarmConfig(external_groups=2, take="uniform", wait_s=60.0, round_offers=3)
    node = made(tmp_path, service, Config(tasks=[letters], swarm=swarm), hub, ExactScorer())
    tasks = list(service.tasks(Split.TRAIN))

    async def taken(*differ: bool) -> int:
        """Groups of a round in which some offers have answers that differ."""
        taking = asyncio.ensure_future(node.take(0, logprobs))
        for one in differ:
            assert not taking.done()
            await offered(hub, node, tasks.pop(), *(["?"] if one else []))
        return len(await taking)

    running = asyncio.ensure_future(node.run())
    assert await taken(True, True, True) == 2
    assert await taken(False, False, True) == 1  # the third group of the first round is none of this one's
    assert node.ready == 0
    node.settings = swarm.model_copy(update={"wait_s": 1e-3})
    assert await taken() == 0
    node.settings = swarm
    assert await taken(True, True, True) == 2  # what was missing in one round is not awaited in the next
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_group_is_taken_by_as_many_steps_as_reuse_says(tmp_path: Path) -> None:
    letters = letters_in(tmp_path)
    service, hub = JsonlService(letters, 0), MemorySwarm()
    swarm = SwarmConfig(external_groups=1, take="uniform", wait_s=60.0, reuse=2)
    node = made(tmp_path, service, Config(tasks=[letters], swarm=swarm), hub, ExactScorer())
    running = asyncio.ensure_future(node.run())
    await offered(hub, node, next(iter(service.tasks(Split.TRAIN))), "?")
    assert [len(await node.take(step, logprobs)) for step in range(2)] == [1, 1]
    assert isinstance(peers := node.status()["peers"], dict)
    assert [peer["taken"] for peer in peers.values()] == [2]
    node.settings = swarm.model_copy(update={"wait_s": 1e-3})
    assert await node.take(2, logprobs) == []
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_a_node_sends_no_faster_than_its_peers_admit(tmp_path: Path) -> None:
    letters = letters_in(tmp_path)
    service, hub = JsonlService(letters, 0), MemorySwarm()
    config = Config(tasks=[letters])
    sender, receiver = (made(tmp_path / name, service, config, hub) for name in ("sender", "receiver"))
    claim, answers = Claim("gcd", "?", "2"), (OfferedRollout("2"),)
    offer = Offer(claim, answers, GeneratorKind.RULE, "m", NOW_S)

    async def main() -> None:
        listening = asyncio.ensure_future(receiver.run())
        for _ in range(400):  # far more than a burst
            await sender._share_offer(offer)
        await asyncio.sleep(60)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)

    run_virtual(main())
    assert sender.tally.shared == receiver.ingress.admitted == 400


async def logprobs(rows: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[-1.0] * (len(row) - 1) for row in rows]
