"""Sessions that are evicted, ended or guarded: a clear status, and what was drawn is there."""

import asyncio
import io
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from gateway_engine import Served, served
from shoal.gateway.server import MAX_BODY_BYTES
from shoal.gateway.sessions import CLOSED_KEPT, HELD_CHARACTERS, OpenRequest, SessionBounds, SessionLimits
from shoal.trainer.advantage import rows
from shoal.types import Reward, Rollout
from until import until

ASK = {"messages": [{"role": "user", "content": "what is 3 + 4?"}]}
Scenario = Callable[[Served, aiohttp.ClientSession], Awaitable[None]]


def run(scenario: Scenario, *script: str | None, **options: Any) -> None:
    async def main() -> None:
        async with served(*script, **options) as one, aiohttp.ClientSession() as http:
            await scenario(one, http)

    asyncio.run(main())


async def posted(http: aiohttp.ClientSession, url: str, body: object = None, key: str = "") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with http.post(url, json={} if body is None else body, headers=headers) as answer:
        return answer.status, await answer.json()


class Hands:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_an_idle_session_is_evicted_and_answers_410_from_then_on() -> None:
    clock = Hands()

    async def scenario(one: Served, http: aiohttp.ClientSession) -> None:
        _, idle = await posted(http, f"{one.url}/v1/sessions")
        _, used = await posted(http, f"{one.url}/v1/sessions")
        for opened in (idle, used):
            await posted(http, f"{opened['openai_base_url']}/chat/completions", ASK)
            clock.now_s += 60
        clock.now_s += 30
        await one.gateway.sessions.evict()
        status, body = await posted(http, f"{idle['openai_base_url']}/chat/completions", ASK)
        assert status == 410
        assert "closed after 150 s without a request" in body["error"]["message"]
        status, _ = await posted(http, f"{one.url}/v1/chat/completions", ASK, key=idle["api_key"])
        assert status == 410
        assert (await posted(http, f"{used['openai_base_url']}/chat/completions", ASK))[0] == 200
        assert (await posted(http, f"{idle['anthropic_base_url']}/end"))[0] == 410
        status, exported = await posted(http, f"{used['anthropic_base_url']}/end")
        assert (status, exported["turns"][0]["token_ids"]) == (200, list(one.engine.drawn[1].token_ids))
        assert (await posted(http, f"{used['anthropic_base_url']}/end"))[0] == 410
        assert len(one.gateway.sessions) == 0

    run(scenario, clock=clock, bounds=SessionBounds(idle_s=120))


def test_of_closed_sessions_so_many_are_remembered_and_nothing_is_written() -> None:
    async def scenario(one: Served, http: aiohttp.ClientSession) -> None:
        sessions = one.gateway.sessions
        opened = [sessions.open() for _ in range(CLOSED_KEPT + 5)]
        for session in opened:
            await sessions.end(session)
        assert (len(sessions), len(sessions.closed)) == (0, CLOSED_KEPT)
        assert (await posted(http, f"{one.url}/s/{opened[-1].token}/end"))[0] == 410
        assert (await posted(http, f"{one.url}/s/{opened[0].token}/end"))[0] == 401

    run(scenario)


def test_a_session_past_its_age_answers_no_more_and_hands_out_what_it_drew() -> None:
    clock = Hands()

    async def scenario(one: Served, http: aiohttp.ClientSession) -> None:
        _, opened = await posted(http, f"{one.url}/v1/sessions", {"limits": {"age_s": 10.0}})
        url = f"{opened['openai_base_url']}/chat/completions"
        clock.now_s = 9.0
        assert (await posted(http, url, ASK))[0] == 200
        clock.now_s = 11.0
        status, body = await posted(http, url, ASK)
        assert status == 410
        assert "within 10 s of its begin" in body["error"]["message"]
        _, exported = await posted(http, f"{opened['anthropic_base_url']}/end")
        assert [turn["token_ids"] for turn in exported["turns"]] == [list(one.engine.drawn[0].token_ids)]

    run(scenario, clock=clock)


def test_wrong_tokens_and_a_body_of_10_mb_leave_a_session_as_it_was() -> None:
    async def scenario(one: Served, http: aiohttp.ClientSession) -> None:
        _, opened = await posted(http, f"{one.url}/v1/sessions")
        wrong = opened["api_key"][:-1] + ("A" if opened["api_key"][-1] != "A" else "B")
        for url, key in ((f"{one.url}/s/{wrong}/v1", ""), (f"{one.url}/v1", wrong)):
            status, body = await posted(http, f"{url}/chat/completions", ASK, key)
            assert status == 401
            assert "URL or API key of an open session" in body["error"]["message"]
        assert (await posted(http, f"{one.url}/s/{wrong}/end"))[0] == 401
        url = f"{opened['openai_base_url']}/chat/completions"
        large = io.BytesIO(b'{"messages": "' + b"x" * (10 << 20) + b'"}')
        async with http.post(url, data=large, headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 413
            assert f"at most {MAX_BODY_BYTES} bytes" in (await answer.json())["error"]["message"]
        assert one.engine.received == []
        assert (await posted(http, url, ASK))[0] == 200
        _, exported = await posted(http, f"{opened['anthropic_base_url']}/end")
        assert [turn["token_ids"] for turn in exported["turns"]] == [list(one.engine.drawn[0].token_ids)]

    run(scenario, max_body_bytes=MAX_BODY_BYTES)


def test_over_the_bound_on_tokens_the_longest_idle_sessions_go_and_a_busy_one_stays() -> None:
    clock = Hands()

    async def scenario(one: Served, http: aiohttp.ClientSession) -> None:
        sessions = [one.gateway.sessions.open() for _ in range(12)]
        urls = [f"{one.url}/s/{session.token}/v1/chat/completions" for session in sessions]
        for url in urls[1:]:
            clock.now_s += 1
            await posted(http, url, ASK)
        one.engine.gate.clear()
        busy = asyncio.create_task(posted(http, urls[1], ASK))
        await until(lambda: len(one.engine.received) == 12)
        held = [session.tokens_held for session in sessions]
        one.gateway.sessions.bounds = SessionBounds(tokens=sum(held) - 1)
        await one.gateway.sessions.evict()
        assert [bool(session.ended) for session in sessions] == [True, False, True, *[False] * 9]
        one.engine.gate.set()
        assert (await busy)[0] == 200
        status, body = await posted(http, urls[2], ASK)
        assert status == 410
        assert "tokens" in body["error"]["message"]

    run(scenario, clock=clock)


WORDS = "word " * 500
LARGE: list[dict[str, str]] = [
    {"role": "assistant", "content": WORDS},
    {"role": "tool", "content": "", "tool_call_id": WORDS},
]


@pytest.mark.parametrize("said", LARGE)
def test_a_session_that_holds_too_much_goes_first_also_while_it_is_busy(said: dict[str, str]) -> None:
    async def scenario(one: Served, http: aiohttp.ClientSession) -> None:
        sessions = [one.gateway.sessions.open() for _ in range(12)]
        urls = [f"{one.url}/s/{session.token}/v1/chat/completions" for session in sessions]
        for url in urls[:-1]:
            assert (await posted(http, url, ASK))[0] == 200
        long = {"messages": [*ASK["messages"], said, {"role": "user", "content": "more"}]}
        for _ in range(20):
            assert (await posted(http, urls[-1], long))[0] == 200
        one.engine.delay_s = 0.3
        busy = asyncio.create_task(posted(http, urls[-1], ASK))
        await until(lambda: len(one.engine.received) == 32)
        assert sessions[-1].tokens_held > 20 * len(WORDS) // HELD_CHARACTERS
        one.gateway.sessions.bounds = SessionBounds(tokens=sum(session.tokens_held for session in sessions) - 1)
        await one.gateway.sessions.evict()
        assert [bool(session.ended) for session in sessions] == [*[False] * 11, True]
        assert (await busy)[0] == 200
        assert (await posted(http, urls[-1], ASK))[0] == 410

    run(scenario)


def test_a_full_gateway_opens_no_session() -> None:
    async def scenario(one: Served, http: aiohttp.ClientSession) -> None:
        statuses = [(await posted(http, f"{one.url}/v1/sessions"))[0] for _ in range(3)]
        assert statuses == [200, 200, 503]

    run(scenario, bounds=SessionBounds(sessions=2))


def test_with_an_admin_key_strangers_open_nothing_and_sessions_need_no_more_than_their_own() -> None:
    async def scenario(one: Served, http: aiohttp.ClientSession) -> None:
        for path in ("/v1/sessions", "/v1/chat/completions"):
            for key in ("", "wrong", "schlüssel"):
                status, body = await posted(http, one.url + path, ASK if "chat" in path else {}, key)
                assert status == 401
                assert "admin key" in body["error"]["message"]
        for path in ("/metrics", "/"):
            async with http.get(one.url + path) as answer:
                assert answer.status == 401
        status, opened = await posted(http, f"{one.url}/v1/sessions", {}, "secret")
        assert status == 200
        assert (await posted(http, f"{opened['openai_base_url']}/chat/completions", ASK))[0] == 200
        assert (await posted(http, f"{one.url}/v1/chat/completions", ASK, opened["api_key"]))[0] == 200
        assert (await posted(http, f"{one.url}/v1/chat/completions", ASK, "secret"))[0] == 200

    run(scenario, admin_key="secret", is_open=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disappears_leaves_one_trained_branch(stream: bool) -> None:
    async def scenario(one: Served, http: aiohttp.ClientSession) -> None:
        session = one.gateway.sessions.open()
        url = f"{one.url}/s/{session.token}/v1/chat/completions"
        one.engine.gate.clear()
        gone = asyncio.create_task(posted(http, url, {**ASK, "stream": stream}))
        await until(lambda: bool(one.engine.received))
        gone.cancel()
        await asyncio.wait([gone])
        for _ in range(50):  # turns of the event loop, in which the gateway hears of it, however long they take
            await asyncio.sleep(0.002)
        one.engine.gate.set()
        await until(lambda: bool(session.tree.generations))
        await asyncio.sleep(0.1)  # in which it could be delivered
        (lost,) = session.tree.generations
        assert lost.id not in session.tree._delivered
        (row,) = rows(Rollout("r", (), session.tree.turns(), Reward(1.0)), 1.0)
        assert sum(row.mask) == len(lost.completion.token_ids)
        # The same question from a client that does not say that it tries again: the answer it gets is what trains.
        await posted(http, url, {**ASK, "stream": False} if not stream else ASK)
        kept = {turn.completion for turn in session.tree.turns()}
        assert one.engine.drawn[1] in kept
        trained = sum(sum(row.mask) for row in rows(Rollout("r", (), session.tree.turns(), Reward(1.0)), 1.0))
        assert trained == sum(len(completion.token_ids) for completion in kept)

    run(scenario, "lost", "told")


def test_sub_agents_and_a_compacted_history_are_rows_of_one_session() -> None:
    async def scenario(one: Served, http: aiohttp.ClientSession) -> None:
        session = one.gateway.sessions.open()
        url = f"{one.url}/s/{session.token}/v1/chat/completions"
        main = [*ASK["messages"]]

        async def asked(messages: list[Any]) -> Any:
            status, body = await posted(http, url, {"messages": messages})
            assert status == 200
            return body["choices"][0]["message"]

        main.append(await asked(main))
        sub = [{"role": "system", "content": "a sub-agent"}, {"role": "user", "content": "look"}]
        first, second = await asyncio.gather(asked(sub), asked([*main, {"role": "user", "content": "meanwhile"}]))
        await asked([*sub, first, {"role": "user", "content": "more"}])
        main += [{"role": "user", "content": "meanwhile"}, second]
        compacted = [{"role": "user", "content": "summary: it was 7"}]
        compacted.append(await asked(compacted))
        await asked([*compacted, {"role": "user", "content": "go on"}])
        trained = rows(Rollout("r", session.tree.messages(), session.tree.turns(), Reward(1.0)), 1.0)
        assert len(trained) == 3
        assert sum(sum(row.mask) for row in trained) == sum(len(c.token_ids) for c in one.engine.drawn)

    run(scenario, *"abcdef")


def test_a_call_of_a_tool_that_nobody_offered_reaches_the_client() -> None:
    async def scenario(one: Served, http: aiohttp.ClientSession) -> None:
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        session = one.gateway.sessions.open()
        url = f"{one.url}/s/{session.token}/v1/chat/completions"
        status, body = await posted(http, url, {**ASK, "tools": tools})
        (call,) = body["choices"][0]["message"]["tool_calls"]
        assert (status, call["function"]["name"]) == (200, "fly")
        error = {"role": "tool", "tool_call_id": call["id"], "content": "no tool is called fly"}
        history = [*ASK["messages"], body["choices"][0]["message"], error]
        assert (await posted(http, url, {"messages": history, "tools": tools}))[0] == 200
        assert [generation.parent for generation in session.tree.generations] == [None, 0]

    run(scenario, '<tool_call>{"name": "fly", "arguments": {}}</tool_call>')


def test_a_session_has_a_bounded_number_of_answers_under_way_however_many_it_may_have_in_all() -> None:
    async def scenario(one: Served, http: aiohttp.ClientSession) -> None:
        most = SessionLimits().at_once
        session = one.gateway.sessions.open(OpenRequest(limits=SessionLimits(generations=1 << 20)))
        url = f"{one.url}/s/{session.token}/v1/chat/completions"
        one.engine.gate.clear()
        asked = asyncio.create_task(posted(http, url, {**ASK, "n": most}))
        await until(lambda: len(one.engine.received) == most)
        status, refused = await posted(http, url, ASK)
        assert (status, len(one.engine.received)) == (503, most)
        assert f"at most {most} answers under way" in refused["error"]["message"]
        one.engine.gate.set()
        status, _ = await asked
        assert (status, (await posted(http, url, ASK))[0]) == (200, 200)

    run(scenario)
