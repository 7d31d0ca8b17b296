"""The desk: when answers of people become an offer, and what its page is refused. Real tasks, real HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory_swarm import MemoryExchange, MemorySwarm
from shoal import wire
from shoal.config import Config, TaskConfig
from shoal.errors import ExchangeUnavailable
from shoal.net.identity import Identity
from shoal.net.server import serving
from shoal.swarm.human.human_node import (
    MOST_ANSWERS,
    MOST_CHARACTERS,
    MOST_OPEN,
    TRIES,
    Given,
    HumanNode,
    NotTaken,
    OpenQuestion,
    OpenQuestions,
    QuestionPace,
    QuestionState,
)
from shoal.swarm.human.server import HumanServer, Rates
from shoal.swarm.peer import Joined
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.trust.ingress import IngressFilter, VerifiedMessage
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.envelope import Signer
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout
from shoal.tasks.jsonl import JsonlService
from shoal.types import Message, Reward, RewardStatus, Role, Split, Task
from until import until

PACE = QuestionPace(answers=3, wait_s=10, open_s=100)
HERE, PEER = Identity.fresh(), Identity.fresh()
CLAIM = Claim("letters", "say a", "a")
TASK = Task("letters/1", "letters", (Message(Role.USER, "say a"),), "a")


def question(id_: str = "q", opened_s: float = 0.0) -> OpenQuestion:
    return OpenQuestion(id_, TASK, CLAIM, opened_s)


def said(value: float, user: str = "ann", at_s: float = 0.0, text: str = "?") -> Given:
    return Given(user, text, Reward(value), at_s)


def asked(*values: float, at_s: float = 0.0) -> tuple[OpenQuestions, OpenQuestion]:
    """One open question that got answers of these values."""
    found, one = OpenQuestions(PACE), question()
    found.add(one)
    for index, value in enumerate(values):
        found.take(one, said(value, f"visitor {index}", at_s))
    return found, one


def test_answers_that_differ_become_an_offer_when_they_are_enough_or_no_more_come() -> None:
    enough, one = asked(1, 0, 1)
    assert enough.due(0.0) == [one]
    assert enough.state("q") is QuestionState.SHARED
    few, one = asked(1, 0, at_s=5.0)
    assert few.due(14.9) == []
    assert few.due(15.0) == [one]
    assert few.due(16.0) == []


def test_answers_of_equal_worth_are_never_an_offer_and_expire() -> None:
    alike, _ = asked(1, 1, 1, 1)
    assert alike.due(99.0) == []
    assert alike.state("q") is QuestionState.OPEN
    assert alike.due(100.1) == []
    assert alike.state("q") is QuestionState.DROPPED
    assert alike.dropped == 1
    assert alike.state("never asked") is None


def test_an_answer_on_its_way_is_waited_for() -> None:
    found, one = asked(1, 0, 1)
    one.scoring.add("ann")
    assert found.due(1000.0) == []
    assert found.state("q") is QuestionState.OPEN


def test_what_could_not_be_scored_is_in_no_offer() -> None:
    found, one = asked(1)
    found.take(one, Given("bob", "x", Reward(0.0, RewardStatus.TIMED_OUT), 0.0))
    assert len(one.answers) == 1
    assert one.tries_left("bob") == TRIES - 1  # or somebody could have the scorer busy for ever


def test_a_visitor_goes_on_with_its_question_then_with_what_others_answered_then_with_nothing() -> None:
    found = OpenQuestions(PACE)
    for name in "abc":
        found.add(question(name))
    a, b, c = found.values()
    found.take(b, said(1, "bob"))
    assert found.next_for("ann") is b
    found.take(c, said(0, "ann"))
    assert found.next_for("ann") is c
    found.take(c, said(1, "ann"))  # right: no more of this
    b.passed_by.add("ann")
    assert found.next_for("ann") is a
    a.passed_by.add("ann")
    assert found.next_for("ann") is None


def test_answers_that_need_no_verdict_are_not_taken() -> None:
    found, one = asked()
    one.answers.append(said(0, "ann", text="b"))
    for text, why in ((" \n", "write"), ("x" * (MOST_CHARACTERS + 1), "at most"), ("b", "already")):
        with pytest.raises(NotTaken, match=why):
            found.check(one, "ann", text)
    one.answers += [said(0, "ann", text=str(n)) for n in range(TRIES - 1)]
    with pytest.raises(NotTaken, match="answered"):
        found.check(one, "ann", "c")
    one.answers += [said(0, f"visitor {n}") for n in range(MOST_ANSWERS - TRIES)]
    with pytest.raises(NotTaken, match="all the answers"):
        found.check(one, "bob", "c")


def test_a_visitor_has_one_answer_at_a_time() -> None:
    found, one = asked()
    one.scoring.add("ann")
    with pytest.raises(NotTaken, match="wait"):
        found.check(one, "ann", "b")
    found.check(one, "bob", "b")


def test_open_questions_are_bounded_and_those_with_answers_go_last() -> None:
    found = OpenQuestions(PACE)
    for n in range(MOST_OPEN):
        found.add(question(str(n)))
    found.take(next(iter(found.values())), said(1))
    found["1"].scoring.add("ann")
    found.add(question("new"))
    assert len(found) == MOST_OPEN
    assert [found.state(name) for name in "012"] == [QuestionState.OPEN] * 2 + [QuestionState.DROPPED]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 40)), max_size=30))
def test_whatever_happens_a_question_is_shared_once_and_with_something_to_learn(
    events: list[tuple[str, float, float]],
) -> None:
    found, now_s, shared = OpenQuestions(PACE), 0.0, list[str]()
    for name in "abc":
        found.add(question(name))
    for name, value, passed_s in events:
        now_s += passed_s
        one = found.get(name)
        if one is not None:
            found.take(one, said(value, f"visitor {now_s}", now_s))
        for complete in found.due(now_s):
            assert len({answer.reward.value for answer in complete.answers}) > 1
            shared.append(complete.id)
    assert len(shared) == len(set(shared))


class ExactScorer:
    """A `Scorer` that compares."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        return [Reward(float(answer == task.answer)) for answer in answers]


class Site:
    """A running desk, its URL, and the swarm's other side."""

    def __init__(self, url: str, node: HumanNode, member: MemoryExchange, other: MemoryExchange) -> None:
        self.url, self.node, self.member, self._other = url, node, member, other
        self._door = IngressFilter("reef", PEER.peer_id)

    async def offer(self) -> tuple[str, Offer]:
        """Author and content of the next genuine offer."""
        async with asyncio.timeout(60):
            while True:
                for frame in await self._other.receive(1):
                    message = self._door.admit(frame, 1e9)
                    if isinstance(message, VerifiedMessage) and isinstance(message.content, Offer):
                        return message.peer_id, message.content


@asynccontextmanager
async def site(
    folder: Path,
    *,
    rates: Rates | None = None,
    before: Sequence[Offer] = (),
    joined: Callable[[MemorySwarm], MemoryExchange] = MemorySwarm.join,
) -> AsyncIterator[Site]:
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"say {c}", "answer": c}) for c in "abcdefghijkl"))
    options = {"scorer": "exact", "eval_share": 0.4, "system_prompt": "One letter."}
    config = TaskConfig.model_validate({"name": "letters", "service": "jsonl", "path": str(data), **options})
    service, hub = JsonlService(config, 0), MemorySwarm()
    own, member, other = OwnTasks([service]), joined(hub), hub.join()
    seal = Signer(PEER, "reef", session=1)
    for content in before:
        hub.put(PEER.peer_id, seal.frame(wire.encode(content), 1e9))
    here = Joined(member, own, HERE, folder, Config(tasks=[config]), clock=lambda: 1e9)
    draw = partial(service.draw, Split.TRAIN)
    node = HumanNode(here, ExactScorer(), draw, QuestionPace(answers=2, wait_s=0), seed=1)
    async with asyncio.TaskGroup() as parts, serving(HumanServer(node, rates).app) as url:
        running = parts.create_task(node.run())
        yield Site(url, node, member, other)
        running.cancel()


class Visitor:
    """A browser's side of the page's requests."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.http = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))

    async def __aenter__(self) -> "Visitor":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()

    async def post(self, path: str, **body: object) -> tuple[int, dict[str, object]]:
        async with self.http.post(f"{self._url}/api/{path}", json=body) as reply:
            return reply.status, await reply.json()

    async def ask(self, passed: object = None) -> dict[str, object]:
        status, found = await self.post("question", **{"pass": passed})
        assert status == 200, found
        return found

    async def say(self, question: dict[str, object], text: str) -> dict[str, object]:
        status, found = await self.post("answer", question=question["id"], text=text)
        assert status == 200, found
        return found


async def test_the_answers_of_two_people_are_one_offer_signed_by_the_node(tmp_path: Path) -> None:
    async with site(tmp_path) as at, Visitor(at.url) as ann, Visitor(at.url) as bob:
        first, second = await ann.ask(), await bob.ask()
        assert first["question"] == second["question"]  # both get the same one, so that there can be a group
        assert first["instructions"] == "One letter."
        message = str(first["question"])[-1]
        assert message not in first.values()
        wrong = await ann.say(first, "?")
        assert (wrong["right"], wrong["tries_left"], wrong["truth"], wrong["others"]) == (False, 2, None, [])
        right = await bob.say(second, message)
        assert (right["right"], right["tries_left"], right["truth"]) == (True, 0, message)
        assert right["others"] == [
            {"generator": "person", "model": "", "text": "?", "status": "scored", "reward": 0.0, "right": False}
        ]
        author, offer = await at.offer()
        assert author == HERE.peer_id
        assert offer.claim == Claim("letters", f"say {message}", message)
        assert (offer.generator, offer.rollouts) == (
            GeneratorKind.PERSON,
            (OfferedRollout("?"), OfferedRollout(message)),
        )
        async with ann.http.get(f"{at.url}/api/state/{first['id']}") as reply:
            assert await reply.json() == {"state": "shared"}
        assert (await ann.ask())["id"] != first["id"]


async def test_nobody_is_shown_an_own_wrong_answer_as_another_s(tmp_path: Path) -> None:
    async with site(tmp_path) as at, Visitor(at.url) as ann, Visitor(at.url) as bob:
        found = await ann.ask()
        await ann.say(found, "?")
        await ann.say(found, "!")
        await bob.ask()
        await bob.say(found, "?")
        verdict = await bob.say(found, str(found["question"])[-1])
        assert [one["text"] for one in verdict["others"]] == ["!"]  # type: ignore[attr-defined]


async def test_who_passes_a_question_over_is_asked_another(tmp_path: Path) -> None:
    async with site(tmp_path, rates=Rates(lambda: 0.0, burst=30)) as at, Visitor(at.url) as ann:
        asked = [await ann.ask()]
        for _ in range(20):
            asked.append(await ann.ask(asked[-1]["id"]))
        texts = [one["question"] for one in asked]
        assert all(before != after for before, after in pairwise(texts)), texts


async def test_an_offer_waits_for_an_exchange_that_is_away(tmp_path: Path) -> None:
    async with site(tmp_path) as at, Visitor(at.url) as ann:
        at.member.here.clear()
        found = await ann.ask()
        await ann.say(found, "?")
        await ann.say(found, str(found["question"])[-1])
        await asyncio.sleep(0.6)
        assert at.node.tally.shared == 0
        at.member.here.set()
        _, offer = await at.offer()
        assert len(offer.rollouts) == 2


class FirstAcknowledgementLost(MemoryExchange):
    """The swarm has the first frame, and who sent it does not know."""

    sent: tuple[bytes, ...] = ()

    async def publish(self, author: str, frame: bytes) -> None:
        await super().publish(author, frame)
        self.sent += (frame,)
        if len(self.sent) == 1:
            raise ExchangeUnavailable("no acknowledgement came")


async def test_an_offer_whose_acknowledgement_was_lost_is_the_same_bytes_the_next_time(tmp_path: Path) -> None:
    async with site(tmp_path, joined=FirstAcknowledgementLost) as at, Visitor(at.url) as ann:
        found = await ann.ask()
        await ann.say(found, "?")
        await ann.say(found, str(found["question"])[-1])
        await until(lambda: at.node.tally.shared == 1)
        assert isinstance(at.member, FirstAcknowledgementLost)
        assert at.member.sent == at.member.sent[:1] * 2


async def test_a_peer_s_question_is_asked_only_if_it_is_ours_and_true(tmp_path: Path) -> None:
    def of_peer(question: str, truth: str) -> Offer:
        claim = Claim("letters", question, truth)
        return Offer(claim, (OfferedRollout("b"), OfferedRollout("?")), GeneratorKind.FROZEN, "m", 1e9)

    lies = [of_peer("say nothing", "x"), of_peer("say b", "c")] * 20
    async with site(tmp_path, before=lies) as at, Visitor(at.url) as ann:
        await until(lambda: len(at.node._offered) == len(lies))
        seen = await ann.ask()
        for _ in range(6):
            seen = await ann.ask(seen["id"])
            assert seen["question"] != "say nothing"
        assert at.node.ingress.refused[Reason.UNKNOWN_TASK] > 0


async def test_a_peer_s_true_question_is_asked_and_its_answers_are_shown_with_this_node_s_verdict(
    tmp_path: Path,
) -> None:
    offers = [
        Offer(
            Claim("letters", f"say {c}", c),
            (OfferedRollout(c), OfferedRollout("?")),
            GeneratorKind.FROZEN,
            "m",
            1e9,
        )
        for c in "abcdefghijkl"
    ]
    async with site(tmp_path, before=offers) as at, Visitor(at.url) as ann:
        await until(lambda: len(at.node._offered) == len(offers))
        asked = await ann.ask()
        letter = str(asked["question"])[-1]
        await until(lambda: len(at.node.questions[str(asked["id"])].others) == 2)
        right = {
            "generator": "frozen",
            "model": "m",
            "text": letter,
            "status": "scored",
            "reward": 1.0,
            "right": True,
        }
        wrong = {**right, "text": "?", "reward": 0.0, "right": False}
        assert (await ann.say(asked, letter))["others"] == [right, wrong]


def test_a_banned_peer_s_question_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "banned.txt").write_text(f"{PEER.peer_id}\n")
    claim = Claim("letters", "say b", "b")
    offer = Offer(claim, (OfferedRollout("b"),), GeneratorKind.FROZEN, "m", 1e9)

    async def main() -> None:
        async with site(tmp_path, before=[offer]) as at:
            await until(lambda: bool(at.node.status()["refused"]))
            assert at.node.status()["refused"] == {"banned": 1}
            assert json.loads((tmp_path / "status.json").read_text())["peer_id"] == HERE.peer_id

    asyncio.run(main())


async def test_the_page_is_guarded_by_its_headers_and_its_cookie(tmp_path: Path) -> None:
    async with site(tmp_path) as at, Visitor(at.url) as ann:
        for path in ("/", "/style.css", "/desk.js", "/api/status", "/api/state/none"):
            async with ann.http.get(at.url + path) as reply:
                policy = reply.headers["content-security-policy"]
                assert policy.startswith("default-src 'none'; script-src 'self'"), path
                assert "unsafe" not in policy
                assert "://" not in await reply.text(), "nothing is fetched from elsewhere"
        async with ann.http.post(f"{at.url}/api/question", json={}) as reply:
            cookie = reply.headers["set-cookie"].lower()
            assert "httponly" in cookie
            assert "samesite=strict" in cookie


async def test_a_page_refuses_with_a_sentence(tmp_path: Path) -> None:
    async with site(tmp_path) as at, Visitor(at.url) as ann, Visitor(at.url) as stranger:
        found = await ann.ask()
        url = f"{at.url}/api/answer"
        assert (await stranger.post("answer", question=found["id"], text="a"))[0] == 403
        assert (await ann.post("answer", question="gone", text="a"))[0] == 404
        assert (await ann.post("answer", question=found["id"], text=" "))[0] == 409
        assert (await ann.post("answer", question=found["id"], text="x" * 4001))[0] == 409
        assert (await ann.post("answer", question=found["id"], text="x" * 40_000))[0] == 413
        assert (await ann.post("answer", question=found["id"]))[0] == 400
        assert (await ann.post("answer", question=found["id"], text="a", more=1))[0] == 400
        async with ann.http.post(url, data={"question": found["id"], "text": "a"}) as reply:  # as a form would
            assert reply.status == 415
        async with ann.http.post(url, data=b"[" * 20_000, headers={"content-type": "application/json"}) as reply:
            assert reply.status == 400


async def test_rates_hold_for_a_visitor_and_for_an_address_that_changes_its_cookie(tmp_path: Path) -> None:
    rates = Rates(lambda: 0.0, user_per_s=1, burst=4)
    async with site(tmp_path, rates=rates) as at, Visitor(at.url) as ann:
        statuses = [(await ann.post("question"))[0] for _ in range(6)]
        assert statuses == [200] * 4 + [429] * 2
        for _ in range(30):
            async with Visitor(at.url) as fresh:
                status, found = await fresh.post("question")
        assert (status, found["error"]["message"]) == (429, "slowly, please: wait a few seconds")


async def test_a_made_up_cookie_is_nobodys_and_a_forwarded_address_is_no_new_allowance(tmp_path: Path) -> None:
    rates = Rates(lambda: 0.0, user_per_s=0.1, burst=2)  # an address may ask ten times
    async with site(tmp_path, rates=rates) as at, Visitor(at.url) as ann:
        found = await ann.ask()
        body = {"question": found["id"], "text": "a"}
        for cookie in ("x" * 22, f"{'x' * 22}.{'0' * 32}"):
            made_up = aiohttp.ClientSession(cookies={"visitor": cookie})
            async with made_up as http, http.post(f"{at.url}/api/answer", json=body) as reply:
                assert reply.status == 403
        statuses = []
        for n in range(12):
            forwarded = aiohttp.ClientSession(headers={"X-Forwarded-For": f"10.0.0.{n}"})
            async with forwarded as http, http.post(f"{at.url}/api/question", json={"pass": None}) as reply:
                statuses.append(reply.status)
        assert statuses.count(200) == 9
        assert set(statuses) == {200, 429}
