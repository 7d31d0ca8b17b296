"""The client of an engine against servers that are none: only what an engine itself refuses is refused."""

import asyncio
import json
from contextlib import aclosing
from pathlib import Path

import pytest

from shoal.engine.external.detect_server import connect
from shoal.engine.server.http_client import HttpEngine
from shoal.errors import EngineUnavailable, RequestRefused
from shoal.net.client import Client, exchange, session
from shoal.types import Sampling
from stub_server import Stub, stubbed

DEEP = b'{"choices": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001


def answer(**changed: object) -> bytes:
    spans = [{"version": 0, "start": 0, "end": 1}]
    choice = {"index": 0, "token_ids": [5], "logprobs": drawn(-0.5), "finish_reason": "stop", "weight_versions": spans}
    return json.dumps({"choices": [{**choice, **changed}]}).encode()


def drawn(*logprobs: float) -> dict[str, object]:
    return {"content": [{"token_id": 5, "logprob": logprob} for logprob in logprobs]}


@pytest.mark.parametrize(
    "given",
    [
        (200, b"<html>welcome</html>"),
        (200, b'{"choices": "\xff"}'),
        (200, DEEP),
        (200, b'{"choices": []}'),
        (200, answer(finish_reason="gone")),
        (200, answer(weight_versions=None)),
        (200, answer(weight_versions=[{"version": "default", "start": 0, "end": 1}])),
        (200, answer(logprobs=None)),
        (200, answer(logprobs=drawn(-0.5, -0.5))),
        (200, answer(logprobs=drawn(0.5))),
        (404, b"404 page not found"),
        (429, b"too many"),
        (502, DEEP),
    ],
)
def test_an_answer_that_no_engine_gives_makes_the_engine_unavailable(given: tuple[int, bytes]) -> None:
    async def ask() -> None:
        async with stubbed(Stub(otherwise=given)) as url, aclosing(HttpEngine(url)) as engine:
            with pytest.raises(EngineUnavailable):
                await engine.generate([5], Sampling(1))

    asyncio.run(ask())


async def test_health_that_a_proxy_answers_is_none() -> None:
    for status in (400, 404, 503):
        async with stubbed(Stub(otherwise=(status, b"not here"))) as url, aclosing(HttpEngine(url)) as engine:
            with pytest.raises(EngineUnavailable, match=f"HTTP {status} on /health: not here"):
                await engine.alive()


def test_a_request_whose_client_was_closed_meanwhile_finds_no_engine() -> None:
    async def ask() -> None:
        http = session()
        await http.close()
        await exchange(http, "GET", "http://127.0.0.1:9/info", b"", {}, timeout_s=1.0)

    with pytest.raises(EngineUnavailable, match="the client was closed"):
        asyncio.run(ask())


def test_a_closed_client_opens_no_connection_again() -> None:
    async def ask() -> None:
        async with stubbed(Stub(otherwise=(200, b"{}"))) as url:
            client = Client(url)
            await client.status("GET", "/info")
            await client.aclose()
            await client.status("GET", "/info")

    with pytest.raises(EngineUnavailable, match="the client was closed"):
        asyncio.run(ask())


async def test_what_the_engine_refuses_is_refused() -> None:
    for status in (400, 413):
        async with stubbed(Stub(otherwise=(status, b"no such token"))) as url, aclosing(HttpEngine(url)) as engine:
            with pytest.raises(RequestRefused, match="no such token"):
                await engine.scored([5])


async def test_deep_nesting_of_another_projects_server_makes_it_unavailable() -> None:
    async with stubbed(Stub(otherwise=(200, DEEP))) as url:
        asking = Client(url)
        with pytest.raises(EngineUnavailable, match="something else than expected"):
            await asking.ask("GET", "/", dict)
        await asking.aclose()
    async with stubbed(Stub(otherwise=(500, DEEP))) as url:
        asking = Client(url)
        with pytest.raises(EngineUnavailable, match="HTTP 500"):
            await asking.ask("GET", "/", dict)
        await asking.aclose()


async def test_a_proxy_whose_server_is_not_up_yet_is_no_wrong_configuration(tmp_path: Path) -> None:
    async with stubbed(Stub(otherwise=(502, b"bad gateway"))) as url:
        with pytest.raises(EngineUnavailable, match="HTTP 502: bad gateway"):
            await connect(url, on_update="keep", model_dir=tmp_path, sampling=Sampling(8))
