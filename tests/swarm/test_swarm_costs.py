"""What strangers can cost a node: of their answers, its scorer and its steps, no more than it allows."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from test_swarm_envelope import nested

from benchmarks.memory_swarm import MemoryExchange, MemorySwarm
from buffer_values import open_buffer
from shoal import wire
from shoal.config import Config, RewardConfig, SwarmConfig, TaskConfig
from shoal.config.settings import RolloutConfig
from shoal.experience.log import newest_groups, snapshot
from shoal.model.renderer_loading import load_renderer
from shoal.net.identity import Identity
from shoal.reward.service import RewardService
from shoal.swarm.node import Node
from shoal.swarm.peer import BANNED_FILE, STATUS_FILE, Joined
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.trust.contents import MOST_PER_QUESTION, Contents
from shoal.swarm.trust.ingress import ESTABLISHED
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.envelope import Signer
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout
from shoal.tasks.library import Library
from shoal.types import Group, Message, Reward, Role, Rollout, Split, Task
from until import until

HANG = "1e99999999"
"""coin_flip reads it as a fraction: minutes inside one multiplication."""
TIMEOUT_S = 1.0
TASKS = [TaskConfig(name="coin_flip")]


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    with Library(TASKS, 0) as library:
        yield library


class Stranger:
    """An author with an identity of its own."""

    def __init__(self, exchange: MemoryExchange) -> None:
        self.identity = Identity.fresh()
        self._exchange = exchange
        self._signer = Signer(self.identity, "reef", session=1)

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    async def says(self, claim: Claim, *answers: str, now_s: float | None = None) -> None:
        rollouts, now_s = tuple(OfferedRollout(answer) for answer in answers), now_s or time.time()
        content = Offer(claim, rollouts, GeneratorKind.FROZEN, "model", now_s)
        await self.sends(self._signer.frame(wire.encode(content), now_s))

    async def sends(self, frame: bytes) -> None:
        await self._exchange.publish(self.peer_id, frame)


class Reef:
    """A running node, tasks of its own, and strangers."""

    def __init__(self, node: Node, hub: MemorySwarm, tasks: Sequence[Task], claims: Sequence[Claim]) -> None:
        self.node, self._swarm, self.tasks, self.claims = node, hub, tasks, claims

    def stranger(self, *, known: bool = False) -> Stranger:
        made = Stranger(self._swarm.join())
        for _ in range(2 * int(ESTABLISHED) if known else 0):
            self.node.ingress.praise(made.peer_id)
        return made

    def truth(self, i: int) -> str:
        assert self.tasks[i].answer is not None
        return self.tasks[i].answer or ""


def beside(
    library: Library,
    folder: Path,
    model: Path,
    body: Callable[[Reef], Awaitable[None]],
    most_answers: int = 8,
    clock: Callable[[], float] = time.time,
    known: Iterable[Group] = (),
) -> None:
    """Runs `body` beside a node."""

    async def main() -> None:
        own, hub = OwnTasks(library.services), MemorySwarm()
        tasks = [library.services[0].draw(Split.TRAIN, i) for i in range(12)]
        async with RewardService(RewardConfig(timeout_s=TIMEOUT_S)) as scorer:
            swarm = SwarmConfig(external_groups=4)
            config = Config(tasks=TASKS, rollout=RolloutConfig(group_size=most_answers), swarm=swarm)
            joined = Joined(hub.join(), own, Identity.fresh(), folder, config, clock=clock)
            node = Node(joined, scorer, load_renderer(model), 1024, known=partial(nullcontext, known))
            running = asyncio.ensure_future(node.run())
            await body(Reef(node, hub, tasks, [await own.claim(task) for task in tasks]))
            assert not running.done()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        own.close()

    asyncio.run(main())


async def logprobs(rows: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[-1.0] * (len(row) - 1) for row in rows]


def test_a_frame_that_is_nested_without_end_ends_nothing(
    library: Library, tmp_path: Path, tiny_model_dir: Path
) -> None:
    async def body(reef: Reef) -> None:
        for depth in (1_000, 50_000):
            await reef.stranger().sends(nested(depth))
        await reef.stranger().says(reef.claims[0], reef.truth(0), "no")
        await until(lambda: reef.node.ready == 1)
        assert reef.node.ingress.refused[Reason.MALFORMED] == 2

    beside(library, tmp_path, tiny_model_dir, body)


def test_answers_that_hang_cost_one_deadline_and_their_author_what_it_was(
    library: Library, tmp_path: Path, tiny_model_dir: Path
) -> None:
    async def body(reef: Reef) -> None:
        node, known = reef.node, reef.stranger(known=True)
        before = node.ingress.trust(known.peer_id)
        await known.says(reef.claims[0], *[HANG] * 8)
        await until(lambda: node.ingress.refused[Reason.HANGS] == 1)
        assert node.ingress.is_newcomer(known.peer_id)
        assert node.ingress.trust(known.peer_id) < before

    beside(library, tmp_path, tiny_model_dir, body)


def test_while_newcomers_hang_the_established_are_verified(
    library: Library, tmp_path: Path, tiny_model_dir: Path
) -> None:
    async def body(reef: Reef) -> None:
        node, known = reef.node, reef.stranger(known=True)
        for i in range(6):
            await reef.stranger().says(reef.claims[0], HANG, HANG + str(i))
        await until(lambda: node.ingress.refused[Reason.HANGS] == 1)
        for i in range(1, 11):
            await known.says(reef.claims[i], reef.truth(i), "no")
        await until(lambda: node.ready == 10)
        assert node.ingress.refused[Reason.HANGS] == 1  # the other five wait for half a minute

    beside(library, tmp_path, tiny_model_dir, body)


def test_a_group_of_a_peer_is_no_larger_than_one_s_own(library: Library, tmp_path: Path, tiny_model_dir: Path) -> None:
    async def body(reef: Reef) -> None:
        known = reef.stranger(known=True)
        await known.says(reef.claims[0], *[reef.truth(0), "no"] * 5)  # any six of them are right and wrong ones
        await known.says(reef.claims[1], reef.truth(1), "no")
        await until(lambda: reef.node.ready == 2)
        groups = await reef.node.take(0, logprobs)
        assert sorted(len(group.rollouts) for group in groups) == [2, 6]
        assert reef.node.ready == 0  # each is trained on once

    beside(library, tmp_path, tiny_model_dir, body, most_answers=6)


def test_an_offer_is_ready_for_as_long_as_it_is_fresh_and_then_counts_as_stale_once(
    library: Library, tmp_path: Path, tiny_model_dir: Path
) -> None:
    times_s = [1.8e9]

    async def body(reef: Reef) -> None:
        node = reef.node
        await reef.stranger(known=True).says(reef.claims[0], reef.truth(0), "no", now_s=times_s[0])
        await until(lambda: node.ready == 1)
        times_s.append(times_s[0] + node.fresh_s)
        assert (node.ready, node.ingress.refused[Reason.STALE]) == (1, 0)
        times_s.append(times_s[1] + 1)
        for _ in range(2):
            assert (node.ready, node.ingress.refused[Reason.STALE]) == (0, 1)

    beside(library, tmp_path, tiny_model_dir, body, clock=lambda: times_s[-1])


def test_one_content_is_praised_and_taken_once_whoever_signs_it(
    library: Library, tmp_path: Path, tiny_model_dir: Path
) -> None:
    async def body(reef: Reef) -> None:
        node, first, copies = reef.node, reef.stranger(), [reef.stranger(known=True) for _ in range(3)]
        await first.says(reef.claims[0], reef.truth(0), "no")
        await until(lambda: node.ready == 1)
        for _ in range(10):
            for copy in copies:
                await copy.says(reef.claims[0], f" {reef.truth(0)}", "NO")
        await until(lambda: node.ingress.refused[Reason.REPEATED] == 30)
        assert node.ready == 1
        for junk in range(9):  # a new text each time, of one author and one question
            await copies[0].says(reef.claims[0], reef.truth(0), f"never said {junk}")
        await until(lambda: node.ingress.refused[Reason.REPEATED] == 38)
        assert node.ready == 2
        await copies[0].says(reef.claims[1], reef.truth(1), "no")
        await until(lambda: node.ready == 3)
        assert node.ingress.peers[first.peer_id].good == 1.0

    beside(library, tmp_path, tiny_model_dir, body)


def answered(task: Task, *texts: str) -> Group:
    rollouts = (Rollout(text, (*task.messages, Message(Role.ASSISTANT, text)), (), Reward(0.0)) for text in texts)
    return Group("x", task, tuple(rollouts), 0)


CYRILLIC = str.maketrans("aeiopcsxyAEHKMOPCTX", "аеіорсѕхуАЕНКМОРСТХ")


@pytest.mark.parametrize("junk", [(), ("never said before, and by nobody at all",)])
@pytest.mark.parametrize(
    "made",
    [
        str,
        str.upper,
        lambda text: text.replace("o", "o\u200b"),
        lambda text: text + "\u0301",
        lambda text: text.translate(CYRILLIC),
        lambda text: text.upper().translate(CYRILLIC),
        lambda text: text.replace("o", "\u03bf"),
        lambda text: text.replace("h", "\U0001d421"),
        lambda text: text + "\ud800",
    ],
)
def test_own_answers_are_never_taken_back_whatever_is_changed_or_added(
    library: Library, made: Callable[[str], str], junk: tuple[str, ...]
) -> None:
    task, contents = library.services[0].draw(Split.TRAIN, 0), Contents()
    for texts in (["five heads, so the answer is one half", "two coins were thrown, so it is 1/4"], ["a", "b", "b"]):
        contents.remember(answered(task, *texts))
        assert contents.repeats(task, [*map(made, texts), *junk], "stranger", 0.0)
    assert not contents.repeats(task, ["a", "c"], "stranger", 0.0)


def test_short_answers_that_agree_by_chance_are_no_copies_and_a_question_counts_a_few_times(library: Library) -> None:
    task, contents = library.services[0].draw(Split.TRAIN, 0), Contents()
    taken = []
    for texts in ("abb", "aab", "abc", "ba", "ccc", "ddd"):
        if not contents.repeats(task, list(texts), texts, 0.0):
            contents.take(task, list(texts), texts, 1.0)
            taken.append(texts)
    assert taken == ["abb", "aab", "abc", "ccc"], "all of `ba` were in one offer"
    assert len(taken) == MOST_PER_QUESTION
    assert not contents.repeats(task, ["e", "d"], "late", 1.0)


def test_long_answers_of_several_offers_are_copies_together_too(library: Library) -> None:
    task, contents = library.services[0].draw(Split.TRAIN, 0), Contents()
    long = [f"throw number {number} of the coin came up heads" for number in range(5)]
    for author, texts in (("x", long[:2]), ("y", long[2:4])):
        assert not contents.repeats(task, texts, author, 0.0)
        contents.take(task, texts, author, 1.0)
    assert contents.repeats(task, [long[0], long[2], "never said"], "z", 0.0)
    assert not contents.repeats(task, [long[0], long[4]], "z", 0.0), "one is new"


def test_different_answers_in_another_script_are_no_copies(library: Library) -> None:
    task, contents = library.services[0].draw(Split.TRAIN, 0), Contents()
    contents.remember(
        answered(task, "бросили две монеты, поэтому одна четвёртая", "значит, ответ равен одной второй, то есть 1/2")
    )
    assert not contents.repeats(
        task, ["бросили три монеты, поэтому одна восьмая", "значит, ответ равен одной трети"], "x", 0.0
    )


def test_a_run_that_goes_on_knows_its_own_answers_when_a_stranger_offers_them(
    library: Library, tmp_path: Path, tiny_model_dir: Path
) -> None:
    task = library.services[0].draw(Split.TRAIN, 0)
    said = (
        str(task.answer),
        "these numbers have no sum that is known to me",
        "their sum is beyond all that I can count to",
    )

    async def earlier() -> None:
        buffer = open_buffer(tmp_path / "run")
        await buffer.admit("x", task.service)
        await buffer.add(answered(task, *said))
        await buffer.close()

    async def body(reef: Reef) -> None:
        await reef.stranger(known=True).says(reef.claims[0], *said)
        await until(lambda: reef.node.ingress.refused[Reason.REPEATED] or reef.node.ready)
        assert reef.node.ready == 0

    asyncio.run(earlier())
    with snapshot(tmp_path / "run") as connection:
        beside(library, tmp_path / "node", tiny_model_dir, body, known=newest_groups(connection, 9, 9))


def test_a_run_that_goes_on_hears_a_stop_while_it_remembers_its_groups(
    library: Library, tmp_path: Path, tiny_model_dir: Path
) -> None:
    turns = list[str]()

    async def hears() -> None:
        while True:
            turns.append("hears")
            await asyncio.sleep(0)

    def groups() -> Iterator[Group]:
        for i in range(3):
            turns.append("group")
            yield answered(library.services[0].draw(Split.TRAIN, i), "a", "b")

    async def body(reef: Reef) -> None:
        hearing = asyncio.ensure_future(hears())
        await until(lambda: turns.count("group") == 3)
        await reef.stranger().says(reef.claims[0], reef.truth(0), "no")
        await until(lambda: reef.node.ready == 1)
        hearing.cancel()
        assert turns.count("hears") >= 3
        assert ["group", "group"] not in [turns[i : i + 2] for i in range(len(turns))]

    beside(library, tmp_path, tiny_model_dir, body, known=groups())


def test_a_run_that_goes_on_remembers_what_it_trained(library: Library) -> None:
    task = library.services[0].draw(Split.TRAIN, 0)
    answered = tuple(
        Rollout(text, (*task.messages, Message(Role.ASSISTANT, text)), (), Reward(0.0)) for text in ("a", "b")
    )
    contents = Contents()
    contents.remember(Group("x", task, answered, 0))
    assert contents.repeats(task, ["A ", "b"], "x", 0.0)
    assert not contents.repeats(task, ["A ", "c"], "x", 0.0)
    assert [contents.take(task, ["c"], author, 100.0) for author in "xyx"] == [True, True, False]
    assert contents.repeats(task, ["d"], "x", since_s=99.0)
    assert not contents.repeats(task, ["d"], "x", since_s=101.0)


def test_files_of_people_that_cannot_be_read_or_written_end_nothing_and_are_in_the_status(
    library: Library, tmp_path: Path, tiny_model_dir: Path
) -> None:
    node_folder = tmp_path / "node"
    (node_folder / BANNED_FILE).mkdir(parents=True)
    (node_folder / f"{STATUS_FILE}.unfinished").mkdir()

    async def body(reef: Reef) -> None:
        await until(lambda: set(reef.node.file_failures) == {BANNED_FILE, STATUS_FILE})
        assert BANNED_FILE in str(reef.node.status()["failure"])
        liar = reef.stranger(known=True)
        await liar.says(reef.claims[0], reef.truth(0), "no")
        await liar.says(replace(reef.claims[1], truth="a lie"), "a lie", "no")
        await until(lambda: liar.peer_id in reef.node.ingress.banned)

    beside(library, node_folder, tiny_model_dir, body)
