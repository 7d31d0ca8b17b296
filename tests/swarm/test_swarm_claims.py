"""Which questions of peers a node draws, with whose settings, and why not."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.memory_swarm import MemorySwarm
from shoal import wire
from shoal.config import Config, RewardConfig, SwarmConfig, TaskConfig
from shoal.errors import TaskError
from shoal.model.renderer_loading import load_renderer
from shoal.net.identity import Identity
from shoal.reward.service import RewardService
from shoal.swarm.node import Node
from shoal.swarm.peer import Joined
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.trust.limits import QuestionLimits
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.envelope import Signer
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout
from shoal.tasks.library import Library
from shoal.types import Receipt, Split, Task
from until import until

GCD = TaskConfig(name="gcd", system_prompt="Only the number.")
SUMS = TaskConfig(name="chain_sum", params={"min_terms": 2, "max_terms": 4, "max_digits": 1})


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    with Library([GCD], 0) as library:
        yield library


@pytest.fixture(scope="module")
def claims() -> list[Claim]:
    """Of a specialist in sums."""
    with Library([SUMS], 0) as theirs:
        own = OwnTasks(theirs.services)
        found = [asyncio.run(own.claim(theirs.draw(Split.TRAIN, i))) for i in range(8)]
        own.close()
    return found


@pytest.fixture(scope="module")
def anything(library: Library) -> Iterator[OwnTasks]:
    own = OwnTasks(library.services, SwarmConfig(datasets="any"), limits=QuestionLimits(characters=400))
    yield own
    own.close()


def decided(own: OwnTasks, claim: Claim) -> Task | Reason:
    return asyncio.run(own.task(claim))


def with_settings(claim: Claim, dataset: str = "chain_sum", **settings: object) -> Claim:
    assert claim.receipt is not None
    return replace(claim, receipt=replace(claim.receipt, dataset=dataset, config=json.dumps(settings, sort_keys=True)))


def test_a_node_draws_the_datasets_that_it_says(library: Library, anything: OwnTasks, claims: list[Claim]) -> None:
    named = OwnTasks(library.services, SwarmConfig(datasets=["chain_sum", "chain_smu"]))
    with pytest.raises(TaskError, match="did you mean 'chain_sum'"):
        named.check()
    for own in (anything, named):
        found = decided(own, claims[0])
        assert isinstance(found, Task)
        assert found.answer == claims[0].truth
        assert [message.content for message in found.messages] == ["Only the number.", claims[0].question]
    named.close()
    for bounds in (SwarmConfig(), SwarmConfig(datasets=["leg_counting"])):
        other = OwnTasks(library.services, bounds)
        assert decided(other, claims[0]) is Reason.UNKNOWN_TASK
        other.close()


def test_a_node_without_a_dataset_of_its_own_draws_those_of_others_without_a_system_prompt(claims: list[Claim]) -> None:
    own = OwnTasks([], SwarmConfig(datasets="any"))
    found = decided(own, claims[0])
    own.close()
    assert isinstance(found, Task)
    assert [message.content for message in found.messages] == [claims[0].question]


def test_the_same_dataset_is_drawn_with_the_settings_of_the_offer(claims: list[Claim]) -> None:
    with Library([SUMS.model_copy(update={"params": {"max_terms": 2}})], 0) as mine:
        strict, open_ = OwnTasks(mine.services), OwnTasks(mine.services, SwarmConfig(datasets=["chain_sum"]))
        assert decided(strict, claims[0]) is Reason.UNKNOWN_TASK
        assert isinstance(decided(open_, claims[0]), Task)
        strict.close()
        open_.close()


def evil(path: Path) -> str:
    return f"+__import__('pathlib').Path({str(path)!r}).touch() or 1+"


def test_settings_of_peers_bring_no_words_no_files_and_no_sizes(
    anything: OwnTasks, claims: list[Claim], tmp_path: Path
) -> None:
    touched = tmp_path / "executed"
    (tmp_path / "secret.txt").write_text("secret words of this machine")
    for claim in (
        with_settings(claims[0], "basic_arithmetic", operators=[evil(touched)]),
        with_settings(claims[0], "spell_backward", data_file=str(tmp_path / "secret.txt")),
        with_settings(claims[0], "figlet_font", static_font="../../etc/passwd"),
        with_settings(claims[0], max_terms=2**40),
        with_settings(claims[0], min_terms=300, max_terms=300),
        with_settings(claims[0], max_terms=[1] * 2000),
    ):
        assert decided(anything, claim) is Reason.OUT_OF_BOUNDS, claim.receipt
    for claim in (with_settings(claims[0], "no_such_dataset"), with_settings(claims[0], no_such_setting=1)):
        assert decided(anything, claim) is Reason.NOT_DRAWN
    nested = replace(claims[0], receipt=replace(claims[0].receipt or Receipt("", "", "", 0, 0), config="[" * 4000))
    assert decided(anything, nested) is Reason.NOT_DRAWN
    assert not touched.exists()
    assert isinstance(decided(anything, claims[0]), Task)


def test_a_question_that_takes_too_much_time_or_memory_is_none(library: Library, claims: list[Claim]) -> None:
    own = OwnTasks(library.services, SwarmConfig(datasets="any"), limits=QuestionLimits(draw_s=2.0))
    huge = with_settings(claims[0], "rotate_matrix", min_n=30_000, max_n=30_000)
    assert decided(own, huge) in (Reason.TIMED_OUT, Reason.NOT_DRAWN, Reason.OUT_OF_BOUNDS)
    assert isinstance(decided(own, claims[0]), Task)
    own.close()


def test_a_receipt_that_comes_out_otherwise_is_a_lie_only_where_the_libraries_are_the_same(
    anything: OwnTasks, claims: list[Claim]
) -> None:
    assert decided(anything, replace(claims[0], truth="7000")) is Reason.WRONG_TRUTH
    assert decided(anything, replace(claims[0], question="1 + 1 =")) is Reason.WRONG_QUESTION
    other = replace(claims[0], libraries="python 2.7, numpy 1.0")
    assert isinstance(decided(anything, other), Task)
    for claim in (replace(other, truth="7000"), replace(other, question="1 + 1 =")):
        assert decided(anything, claim) is Reason.OTHER_LIBRARIES


async def logprobs(rows: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[-1.0] * (len(row) - 1) for row in rows]


async def test_a_node_of_one_specialty_trains_on_offers_of_another_one(
    anything: OwnTasks, claims: list[Claim], tmp_path: Path, tiny_model_dir: Path
) -> None:
    hub, specialist = MemorySwarm(), Identity.fresh()
    theirs, seal = hub.join(), Signer(specialist, "reef", session=1)
    async with RewardService(RewardConfig()) as scorer:
        config = Config(tasks=[GCD], swarm=SwarmConfig(external_groups=4, take="uniform"))
        joined = Joined(hub.join(), anything, Identity.fresh(), tmp_path, config)
        node = Node(joined, scorer, load_renderer(tiny_model_dir), 1024)
        running = asyncio.ensure_future(node.run())
        lie = replace(claims[4], truth="7000", libraries="python 2.7")
        for claim in (*claims[:4], lie):
            rollouts = (OfferedRollout(claim.truth or ""), OfferedRollout("no"))
            made = Offer(claim, rollouts, GeneratorKind.FROZEN, "sums", time.time())
            frame = seal.frame(wire.encode(made), time.time())
            await theirs.publish(specialist.peer_id, frame)
        await until(lambda: node.ready == 4 and node.ingress.refused[Reason.OTHER_LIBRARIES] == 1)
        groups = await node.take(0, logprobs)
        assert {group.task.service for group in groups} == {"chain_sum"}
        assert sorted(one.reward.value for group in groups for one in group.rollouts)[-4:] == [1.0] * 4
        assert len(groups) == 4  # at the first step, of an author whom nobody knows
        assert specialist.peer_id not in node.ingress.banned
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
