"""The judge: committed questions, signed answers, grades, the leaderboard, what it refuses. Real draws, real HTTP."""

import asyncio
import contextlib
import json
import math
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import mul
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.request import urlopen

import aiohttp
import httpx
import pytest
from starlette.requests import Request

from shoal import wire
from shoal.errors import ConfigError, EngineUnavailable, JudgeError, RequestRefused, WireError
from shoal.net.chat import ChatChoice
from shoal.net.identity import Identity
from shoal.net.server import Refused, address_of, serving
from shoal.run.commands.swarm import NINE
from shoal.swarm.generator import ChatModel
from shoal.swarm.judge.client import fitting, statements, take
from shoal.swarm.judge.judging import Judge, JudgeServer, Rules, leaderboard_html
from shoal.swarm.judge.messages import (
    MOST_BYTES,
    Answers,
    Challenge,
    ChallengeRequest,
    ChallengeVerdict,
    Condition,
    GradedAnswer,
    Revealed,
    Round,
    commitment_of,
    opened,
    signed,
)
from shoal.swarm.judge.store import NEWEST, JudgeStore, Record, Standing, lower_bound
from shoal.swarm.trust.rates import MOST_RATED, Buckets
from shoal.tasks.procedural_client import ProceduralClient, Spec
from shoal.types import Message, Reward, RewardStatus, Task

SUMS = Spec("chain_sum", '{"max_digits": 1, "max_terms": 2, "min_digits": 1, "min_terms": 2}')
GCD = Spec("gcd", "{}")
ME, OTHER, HERE = (Identity.fresh() for _ in range(3))
SHOAL = str(Path(sys.executable).with_name("shoal"))


class Clock:
    """Time that a test sets."""

    now_s = 1.8e9

    def __call__(self) -> float:
        return self.now_s


class ExactScorer:
    """A `Scorer` that compares, that some answers hang, and that fails at the next `failures` answers."""

    def __init__(self) -> None:
        self.scored = self.failures = 0

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        self.scored += len(answers)
        if self.failures:
            self.failures -= 1
            return [Reward(0.0, RewardStatus.FAILED)]
        if "hang" in answers:
            return [Reward(0.0, RewardStatus.TIMED_OUT)]
        return [Reward(float(answer == task.answer)) for answer in answers]


@pytest.fixture(scope="module")
def drawer() -> Iterator[ProceduralClient]:
    with ProceduralClient() as one:
        yield one


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def judge(tmp_path: Path, drawer: ProceduralClient, clock: Clock) -> Iterator[Judge]:
    store = JudgeStore(tmp_path)
    yield Judge(store, HERE, [SUMS, GCD], drawer, ExactScorer(), Rules(each=2), clock=clock, steady=clock)
    store.close()


def ask(judge: Judge, identity: Identity = ME, model: str = "m") -> bytes:
    return signed(identity, ChallengeRequest(judge.peer_id, model, Condition.SOLO, 7, judge.now_s()))


def tick(judge: Judge) -> None:
    """A moment later: no two messages of a peer are of the same time."""
    judge.now_s.now_s += 0.001  # type: ignore[attr-defined]  # the clock of this file


async def challenged(judge: Judge, identity: Identity = ME, model: str = "m") -> Challenge:
    tick(judge)
    return opened(await judge.challenge(ask(judge, identity, model)), Challenge, author=HERE.peer_id)[1]


def answers(challenge: Challenge, texts: Sequence[str], identity: Identity = ME) -> bytes:
    return signed(identity, Answers(HERE.peer_id, challenge.id, tuple(texts)))


async def judged(judge: Judge, texts: Sequence[str], identity: Identity = ME) -> ChallengeVerdict:
    data = await judge.verdict(answers(await challenged(judge, identity), texts, identity))
    return opened(data, ChallengeVerdict, author=HERE.peer_id)[1]


def right(challenge: Challenge) -> list[str]:
    """Solves the sums; gcd is beyond this taker."""
    return [solved(question.messages[-1].content) for question in challenge.questions]


def solved(question: str) -> str:
    found = re.search(r"(\d+) ([+-]) (\d+) =", question)
    return str(int(found[1]) + int(found[2] + found[3])) if found else "?"


def test_the_share_of_right_answers_is_the_score(judge: Judge) -> None:
    async def main() -> None:
        challenge = await challenged(judge)
        assert [one.specialty for one in challenge.questions] == ["chain_sum", "chain_sum", "gcd", "gcd"]
        data = await judge.verdict(answers(challenge, right(challenge)))
        _, verdict = opened(data, ChallengeVerdict, author=HERE.peer_id)
        assert (verdict.score, [mark.passed for mark in verdict.marks]) == (0.5, [True, True, False, False])

    asyncio.run(main())
    (standing,) = judge.store.standings(judge.now_s())
    assert (standing.peer_id, standing.score, standing.round) == (ME.peer_id, 0.5, 7)
    assert standing.specialties == {"chain_sum": 1.0, "gcd": 0.0}


def kept(store: JudgeStore, peer_id: str, model: str, scores: Sequence[float], start_s: float = 0.0) -> None:
    """Answered challenges of ten questions each."""
    for i, score in enumerate(scores):
        id_ = f"{peer_id}/{model}/{i}"
        store.issue(Record(id_, 0, peer_id, model, Condition.SOLO, 1, i, start_s + i, start_s + i, b""))
        marks = [GradedAnswer("coin", float(k < 10 * score), RewardStatus.SCORED) for k in range(10)]
        store.answer(id_, b"", marks, score)


def test_a_grade_that_a_taker_was_told_survives_the_loss_of_power(tmp_path: Path) -> None:
    with closing(JudgeStore(tmp_path)) as store:
        assert store._row("PRAGMA synchronous") == (2,)  # FULL
    assert {one.stat().st_mode & 0o77 for one in tmp_path.iterdir()} == {0}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JudgeStore]:
    one = JudgeStore(tmp_path)
    one.put_round(0, b"", b"")
    yield one
    one.close()


def test_a_coin_under_sixty_names_is_one_row_and_its_best_name_is_not_chosen(store: JudgeStore) -> None:
    for i in range(60):
        kept(store, "many", f"name{i}", [0.9 if i == 7 else 0.5], float(i))
    kept(store, "honest", "coin", [0.5] * 10)
    assert [(one.peer_id, one.score) for one in store.standings(1e9)] == [("honest", 0.5), ("many", 0.5)]


def test_the_luckiest_of_many_keys_that_were_judged_once_is_behind_who_was_judged_often(store: JudgeStore) -> None:
    for i in range(60):
        kept(store, f"key{i:02}", "coin", [0.9 if i == 7 else 0.5])
    kept(store, "better", "m", [0.7] * 10)
    first, second = store.standings(1e9)[:2]
    assert (first.peer_id, second.peer_id) == ("better", "key07")
    assert second.at_least < 0.35 < 0.4 < first.at_least


def test_the_bound_of_a_peer_covers_the_truth_in_95_of_100_runs_that_stop_at_the_best_time() -> None:
    rng, truth, runs, wrong = random.Random(0), 0.5, 200, 0
    for _ in range(runs):
        shares = [fmean(rng.random() < truth for _ in range(27)) for _ in range(100)]
        newest = [shares[max(0, t - NEWEST) : t] for t in range(1, len(shares) + 1)]
        best = max(lower_bound(fmean(some), 27 * len(some), 1, t) for t, some in enumerate(newest, 1))
        wrong += best > truth
    assert wrong <= 0.05 * runs


def test_the_errors_of_a_board_that_grows_sum_to_five_percent() -> None:
    """Each peer is on the board from the moment at which it is the newest."""
    share, questions = 0.7, 27
    bounds = [lower_bound(share, questions, peers, challenges) for peers in range(1, 1001) for challenges in (1, 2, 3)]
    errors = [(bound / share) ** (share * questions) for bound in bounds]
    rest = [((1 - bound) / (1 - share)) ** ((1 - share) * questions) for bound in bounds]
    assert 0.03 < math.fsum(map(mul, errors, rest)) <= 0.05


def test_the_easiest_of_open_challenges_does_not_count_first(store: JudgeStore) -> None:
    for i in range(3):
        store.issue(Record(f"{i}", 0, "chooser", "m", Condition.SOLO, 1, i, float(i), 100.0, b""))
    store.answer("2", b"", [GradedAnswer("coin", 1.0, RewardStatus.SCORED)] * 10, 1.0)
    assert store.standings(50.0) == []
    store.answer("0", b"", [GradedAnswer("coin", 0.0, RewardStatus.SCORED)] * 10, 0.0)
    assert [(one.challenges, one.score) for one in store.standings(50.0)] == [(1, 0.0)]
    (over,) = store.standings(101.0)  # the one between was never answered
    assert (over.challenges, over.unanswered, over.score) == (3, 1, 1 / 3)


def test_challenges_of_fewer_questions_prove_no_more_beside_longer_ones(store: JudgeStore) -> None:
    kept(store, "short", "m", [0.6] * 9)
    store.issue(Record("long", 0, "short", "m", Condition.SOLO, 1, 9, 20.0, 20.0, b""))
    marks = [GradedAnswer("coin", float(k < 60), RewardStatus.SCORED) for k in range(100)]
    store.answer("long", b"", marks, 0.6)
    (standing,) = store.standings(1e9)
    assert standing.at_least == lower_bound(0.6, 10 * 10, 1, 10)


def test_silent_keys_move_no_row(store: JudgeStore) -> None:
    kept(store, "often", "m", [0.6] * 10)
    kept(store, "once", "m", [1.0])
    before = store.standings(1e9)
    for i in range(500):
        store.issue(Record(f"silent{i}", 0, f"key{i}", "m", Condition.SOLO, 1, 0, 1.0, 1.0, b""))
    assert store.standings(1e9) == before


def test_a_flood_of_names_gives_no_name_its_rate_anew() -> None:
    buckets, taken = Buckets(1 / 30, 10.0), 0
    for second in range(3):
        taken += sum(buckets.take("one", 0.1 * second) for _ in range(30))
        for i in range(MOST_RATED + 1):
            buckets.take(f"{second}/{i}", 0.1 * second)
    assert taken <= 10
    assert buckets.take("late", 1e6)


def test_a_leaderboard_is_made_once_for_all_who_ask_at_once(judge: Judge) -> None:
    asyncio.run(judged(judge, ["1"] * 4))
    server = JudgeServer(judge)
    first = server._newest()
    server._stale_s = math.inf
    asyncio.run(judged(judge, ["1"] * 4, OTHER))
    assert server._newest() is first
    server._stale_s = 0.0
    assert len(server._newest()) == 2


class SlowStore(JudgeStore):
    """A store whose leaderboard takes a fiftieth of a second at least."""

    def standings(self, now_s: float) -> list[Standing]:
        began_s = time.monotonic()
        while time.monotonic() < began_s + 0.02:
            pass
        return super().standings(now_s)


def test_a_leaderboard_rests_fifty_times_as_long_as_it_took(tmp_path: Path, drawer: ProceduralClient) -> None:
    with closing(SlowStore(tmp_path)) as store:
        server = JudgeServer(Judge(store, HERE, [SUMS], drawer, ExactScorer(), Rules(each=1)))
        began_s = time.monotonic()
        server._newest()
        assert server._stale_s > began_s + 50 * 0.02


@pytest.mark.parametrize("sent_s", [math.nan, math.inf, -1.0])
def test_a_time_that_is_none_is_refused_before_anything_is_drawn(judge: Judge, sent_s: float) -> None:
    body = wire.encode({"judge": HERE.peer_id, "model": "m", "arm": "solo", "round": 1, "sent_s": sent_s})
    signature = ME.sign(b"shoal judge\x00ChallengeRequest\x00" + body)
    frame = wire.encode({"author": ME.public_key, "signature": signature, "body": body})
    with pytest.raises(Refused, match=r"sent_s"):
        asyncio.run(judge.challenge(frame))


def test_a_judge_whose_clock_was_set_back_goes_on(judge: Judge, clock: Clock) -> None:
    right_s, clock.now_s = clock.now_s, clock.now_s + 1e9
    judge.ledger()
    clock.now_s = right_s
    newest, now = (opened(one, Round)[1] for one in judge.ledger().sittings[:2])
    assert now.opens_s == right_s
    assert newest.opens_s == now.closes_s


def test_seeds_are_committed_to_before_and_revealed_after(judge: Judge, clock: Clock) -> None:
    before = judge.ledger()
    sittings, _ = statements(before, HERE.peer_id)
    assert sorted(sittings) == [0, 1]  # that of now, and the next one before it opens
    assert sittings[1].opens_s > clock.now_s
    assert before.seeds == ()
    clock.now_s = sittings[0].reveals_s + 1
    after = judge.ledger()
    (revealed,) = [opened(data, Revealed, author=HERE.peer_id)[1] for data in after.seeds]
    assert commitment_of(revealed.seed) == sittings[0].commitment != sittings[1].commitment
    assert after.sittings[-2:] == before.sittings


async def test_no_two_challenges_of_a_round_or_of_two_share_questions_and_a_restarted_judge_asks_the_same(
    judge: Judge, drawer: ProceduralClient, clock: Clock
) -> None:
    first, second = await challenged(judge), await challenged(judge)
    other = await challenged(judge, OTHER)
    again = Judge(judge.store, HERE, [SUMS, GCD], drawer, ExactScorer(), Rules(each=2), clock=clock)
    _, verdict = opened(await again.verdict(answers(first, right(first))), ChallengeVerdict)
    assert verdict.score == 0.5
    clock.now_s += 3600
    later = await challenged(judge)
    assert (later.sitting, later.attempt) == (first.sitting + 1, first.attempt)
    found = [tuple(one.messages[-1].content for one in each.questions[2:]) for each in (first, second, other, later)]
    assert len(set(found)) == 4


async def test_what_is_not_answered_in_time_counts_as_wrong_and_not_before(judge: Judge, clock: Clock) -> None:
    challenge = await challenged(judge)
    assert judge.store.standings(clock.now_s) == []
    clock.now_s = challenge.deadline_s + 1
    assert judge.store.standings(clock.now_s) == []  # a key that never answered is on no board
    with pytest.raises(Refused, match="deadline"):
        await judge.verdict(answers(challenge, right(challenge)))


def test_answers_that_hang_are_wrong_and_stop_being_tried(judge: Judge) -> None:
    verdict = asyncio.run(judged(judge, ["hang"] * 4))
    assert verdict.score == 0.0
    assert judge._scorer.scored == 2  # type: ignore[attr-defined]  # the fake of this file


@pytest.mark.parametrize(("failures", "score"), [(1, 0.5), (99, 0.0)])
async def test_a_scorer_that_fails_costs_a_taker_nothing_and_one_that_an_answer_breaks_counts_as_wrong(
    judge: Judge, model_url: str, failures: int, score: float
) -> None:
    judge._scorer.failures = failures  # type: ignore[attr-defined]  # the fake of this file
    async with served(judge) as url:
        _, verdict, _ = await take(
            url, ChatModel(model_url, "m"), ME, arm=Condition.SOLO, round_=1, clock=judge.now_s, retry_s=0.001
        )
    assert verdict.score == score


class Counting:
    """A drawer that counts its draws."""

    def __init__(self, drawer: ProceduralClient) -> None:
        self._drawer, self.draws = drawer, 0

    def draw(self, *given: Any) -> Task:
        self.draws += 1
        return self._drawer.draw(*given)


async def test_answers_of_another_number_are_refused_before_any_draw(judge: Judge, drawer: ProceduralClient) -> None:
    counting = judge._drawer = Counting(drawer)  # type: ignore[assignment]
    challenge = await challenged(judge)
    drawn = counting.draws
    with pytest.raises(Refused, match="expected 4, got 5"):
        await judge.verdict(answers(challenge, ["1"] * 5))
    assert counting.draws == drawn


async def answered_twice(judge: Judge) -> bytes:
    challenge = await challenged(judge)
    await judge.verdict(answers(challenge, right(challenge)))
    return await judge.verdict(answers(challenge, right(challenge)))


async def one_too_many_open(judge: Judge) -> bytes:
    for _ in range(3):
        await challenged(judge)
    tick(judge)
    return await judge.challenge(ask(judge))


async def repeated(judge: Judge) -> bytes:
    tick(judge)
    asked = ask(judge)
    await judge.challenge(asked)
    return await judge.challenge(asked)


async def answered_at_the_same_time(judge: Judge) -> bytes:
    challenge = await challenged(judge)
    both = [judge.verdict(answers(challenge, right(challenge))) for _ in range(2)]
    found = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(found[0], bytes)
    assert isinstance(found[1], Refused)
    raise found[1]


async def answers_to(judge: Judge, texts: Sequence[str], identity: Identity = ME) -> bytes:
    return await judge.verdict(answers(await challenged(judge), texts, identity))


async def hoarded(judge: Judge) -> bytes:
    for _ in range(12):
        await judged(judge, ["1"] * 4)
    raise AssertionError("expected a limit")


async def crowded(judge: Judge) -> bytes:
    for _ in range(31):
        await challenged(judge, Identity.fresh())
    raise AssertionError("expected a limit")


async def test_a_key_that_never_answers_costs_no_other_newcomer_a_challenge(judge: Judge, clock: Clock) -> None:
    silent = Identity.fresh()
    for _ in range(5):
        clock.now_s += 0.5
        for _ in range(400):
            with contextlib.suppress(Refused):
                await challenged(judge, silent)
        await challenged(judge, Identity.fresh())


async def test_a_crowd_of_newcomers_costs_nobody_who_has_answered_a_challenge(judge: Judge) -> None:
    await judged(judge, ["1"] * 4)
    with pytest.raises(Refused, match="newcomers"):
        await crowded(judge)
    await challenged(judge)


@pytest.mark.parametrize("honest", ["10.0.0.2", "2001:db8:0:2::1"])
async def test_fresh_keys_of_one_address_cost_no_newcomer_of_another_address_a_challenge(
    judge: Judge, honest: str
) -> None:
    """A host has all addresses of its network of IPv6."""
    for i in range(40):
        status = await posted(judge, f"2001:db8:0:1::{i}")
    assert status == HTTPStatus.TOO_MANY_REQUESTS
    assert await posted(judge, honest) == HTTPStatus.OK


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.2", "10.0.0.2"),
        ("2001:db8:0:1::5", "2001:db8:0:1::/64"),
        ("::ffff:10.0.0.2", "::ffff:10.0.0.2"),
        ("unknown:x", "unknown:x"),
    ],
)
def test_hosts_of_a_network_are_one_address_and_any_text_is(host: str, address: str) -> None:
    assert address_of(Request({"type": "http", "client": (host, 1)})) == address


async def posted(judge: Judge, address: str) -> int:
    """Status of a fresh key's request for a challenge, sent from a network address."""
    transport = httpx.ASGITransport(JudgeServer(judge).app, client=(address, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        headers = {"content-type": "application/octet-stream"}
        answer = await client.post("/challenge", content=ask(judge, Identity.fresh()), headers=headers)
    return answer.status_code


def test_each_challenge_lowers_what_a_score_proves(store: JudgeStore) -> None:
    """Else a key would ask until its newest ones are lucky."""
    for name, count in (("few", 10), ("many", 100)):
        kept(store, name, "m", [0.6] * count)
    few, many = store.standings(1e9)
    assert (few.peer_id, many.peer_id, few.score) == ("few", "many", many.score)
    assert many.at_least < few.at_least


def asked_of(judge: Judge, peer_id: str = HERE.peer_id, late_s: float = 0.0) -> Awaitable[bytes]:
    request = ChallengeRequest(peer_id, "m", Condition.SOLO, 7, judge.now_s() - late_s)
    return judge.challenge(signed(ME, request))


REFUSED: dict[str, Callable[[Judge], Awaitable[bytes]]] = {
    "answered": answered_twice,
    "no such challenge": lambda judge: answers_to(judge, ["1"] * 4, OTHER),
    "expected 4, got 1": lambda judge: answers_to(judge, ["1"]),
    "open challenges first": one_too_many_open,
    "you asked for this": repeated,
    "being graded": answered_at_the_same_time,
    "one challenge every": hoarded,
    "newcomers": crowded,
    "signature": lambda judge: judge.challenge(signed(ME, Answers("", "", ()))),
    "expected wire format": lambda judge: judge.challenge(b"\x00"),
    "expected at most": lambda judge: judge.challenge(bytes(MOST_BYTES + 1)),
    "for the judge": lambda judge: asked_of(judge, "f" * 32),
    "set your clock": lambda judge: asked_of(judge, late_s=900),
}
"""What a judge must refuse, by its words."""


@pytest.mark.parametrize("why", REFUSED)
def test_a_judge_refuses(judge: Judge, why: str) -> None:
    async def main() -> None:
        await REFUSED[why](judge)

    with pytest.raises(Refused, match=why):
        asyncio.run(main())


def test_a_changed_byte_is_nobody_s_message() -> None:
    data = bytearray(signed(ME, Answers("j", "c", ("four",))))
    data[data.index(b"four")] ^= 1
    with pytest.raises(WireError, match="signature"):
        opened(bytes(data), Answers)


def test_the_leaderboard_shows_names_as_text(judge: Judge) -> None:
    name = "<script>alert(1)</script>"

    async def main() -> None:
        challenge = await challenged(judge, model=name)
        await judge.verdict(answers(challenge, right(challenge)))

    asyncio.run(main())
    html = leaderboard_html(HERE.peer_id, judge.store.standings(judge.now_s()), ["chain_sum", "gcd"])
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "0.500" in html


class Model(BaseHTTPRequestHandler):
    """Solves sums, as an OpenAI-compatible server."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = solved(request["messages"][-1]["content"])
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def model_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@asynccontextmanager
async def served(judge: Judge) -> AsyncIterator[str]:
    """The URL of a judge."""
    async with serving(JudgeServer(judge).app) as url:
        yield url


async def test_a_browser_is_told_what_is_a_page_and_what_is_a_message_of_the_protocol(
    judge: Judge, clock: Clock
) -> None:
    judge.ledger()
    clock.now_s += 3600 + 601
    async with served(judge) as url, aiohttp.ClientSession() as http:
        for path, kind in {
            "/": "text/html; charset=utf-8",
            "/style.css": "text/css; charset=utf-8",
            "/leaderboard.json": "application/json",
            "/ledger": "application/octet-stream",
        }.items():
            async with http.get(url + path) as reply:
                assert (reply.status, reply.headers["content-type"]) == (200, kind), path


async def test_a_challenge_without_questions_is_refused_by_its_taker(
    tmp_path: Path, drawer: ProceduralClient, clock: Clock, model_url: str
) -> None:
    with closing(JudgeStore(tmp_path)) as store:
        empty = Judge(store, HERE, [], drawer, ExactScorer(), clock=clock, steady=clock)
        async with served(empty) as url:
            with pytest.raises(WireError, match="expected questions"):
                await take(url, ChatModel(model_url, "m"), ME, arm=Condition.SOLO, round_=1, clock=clock)


def test_a_model_that_answers_nothing_is_an_error_and_not_a_score(judge: Judge) -> None:
    async def main() -> None:
        async with served(judge) as url:
            dead = ChatModel("http://127.0.0.1:9/v1", "m")
            with pytest.raises(EngineUnavailable, match=r"model http://127\.0\.0\.1:9/v1: "):
                await take(url, dead, ME, arm=Condition.SOLO, round_=1, clock=judge.now_s, retry_s=0.001)

    asyncio.run(main())
    assert judge.store.standings(judge.now_s()) == []


class Fussy(ChatModel):
    """Refuses the first question, as a server does with one that is longer than its context."""

    asked = 0

    async def ask(self, messages: Sequence[Message], tries: int, pause_s: float) -> ChatChoice:
        Fussy.asked += 1
        if Fussy.asked == 1:
            raise RequestRefused("HTTP 400: this model's context is 512 tokens")
        return await super().ask(messages, tries, pause_s)


async def test_a_question_that_the_model_refuses_counts_as_wrong_and_the_others_are_answered(
    judge: Judge, model_url: str
) -> None:
    async with served(judge) as url:
        fussy = Fussy(model_url, "m")
        _, verdict, silent = await take(url, fussy, ME, arm=Condition.SOLO, round_=1, clock=judge.now_s)
        assert (len(verdict.marks), silent, Fussy.asked) == (4, 1, 4)


def test_answers_that_are_too_long_together_are_cut_to_fit_a_message() -> None:
    short, long = ["a\ud7ff"] * 5, ["\u6c34" * 20_000] * 27
    assert list(fitting(short)) == short
    assert len(signed(ME, Answers(HERE.peer_id, "x", fitting(long)))) <= MOST_BYTES
    assert {len(text) for text in fitting(long)} == {(MOST_BYTES - 8192) // 27 // 3}
    full = ["a" * 16_384] * 15 + ["a" * 8192]
    assert list(fitting(full)) == full


def test_a_judge_whose_challenges_fit_no_message_does_not_start(judge: Judge, drawer: ProceduralClient) -> None:
    wordy = replace(SUMS, system_prompt="x" * 16_000)
    with pytest.raises(ConfigError, match="expected fewer of every specialty"):
        Judge(judge.store, HERE, [wordy], drawer, ExactScorer(), Rules(each=20))


async def test_a_taker_gets_its_verdict_from_the_judge_that_it_names(
    judge: Judge, clock: Clock, model_url: str
) -> None:
    async with serving(JudgeServer(judge).app) as url:
        ask = partial(take, url, arm=Condition.SWARM, round_=3, clock=clock)
        _, verdict, silent = await ask(ChatModel(model_url, "m"), ME, judge=HERE.peer_id)
        assert (verdict.score, silent) == (0.5, 0)
        with pytest.raises(WireError, match="expected one of"):
            await ask(ChatModel(model_url, "m"), ME, judge=OTHER.peer_id)


def run_shoal(*arguments: str) -> dict[str, object]:
    done = subprocess.run([SHOAL, "judge", *arguments, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_nine_specialties_are_judged_from_the_command_line(tmp_path: Path, model_url: str) -> None:
    folder = tmp_path / "judge"
    command = [SHOAL, "judge", "serve", "--folder", str(folder), "--port", "0", "--questions", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        url, peer = served.stdout.readline().strip(), served.stdout.readline().split()[-1]
        for arm in Condition:
            key = str(tmp_path / arm / "identity.pem")
            found = run_shoal(
                "take", url, "--engine", model_url, "--model", "adder", "--identity", key, "--arm", arm, "--judge", peer
            )
            assert set(NINE) < found.keys()
            assert 0 <= found["pass@1"] < 1
        board = urlopen(f"{url}/").read().decode()
        assert board.count("adder</td>") == 2
        assert len(json.load(urlopen(f"{url}/leaderboard.json"))["standings"]) == 2
        served.send_signal(signal.SIGINT)
        assert served.wait(timeout=60) in (0, 130)


def test_a_judge_that_is_not_there_is_a_sentence() -> None:
    async def main() -> None:
        await take("http://127.0.0.1:9", ChatModel("http://127.0.0.1:9/v1", "m"), ME, arm=Condition.SOLO, round_=0)

    with pytest.raises(JudgeError, match="127"):
        asyncio.run(main())


async def test_a_round_goes_on_with_its_own_specialties_when_the_judge_gets_others(
    judge: Judge, drawer: ProceduralClient, clock: Clock
) -> None:
    await challenged(judge)
    other = Judge(judge.store, HERE, [GCD], drawer, ExactScorer(), Rules(each=1), clock=clock)
    assert len((await challenged(other)).questions) == 4
    clock.now_s = statements(judge.ledger(), None)[0][1].closes_s + 1
    assert len((await challenged(other)).questions) == 1


def test_a_message_of_one_kind_does_not_pass_for_another() -> None:
    round_ = Round(0, 0.0, 1.0, 2.0, bytes(32), 1, ())
    with pytest.raises(WireError, match="signature"):
        opened(signed(ME, round_), Revealed)
