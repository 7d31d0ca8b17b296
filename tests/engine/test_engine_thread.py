"""The thread that steps an engine: nothing that one caller does ends it."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.engine.compute.options import EngineLimits, OnUpdate, PauseMode
from shoal.engine.compute.request import Request
from shoal.engine.compute.step_engine import StepEngine
from shoal.engine.server.engine_thread import EngineThread
from shoal.engine.server.routes import EngineServer
from shoal.model.loading import load_model
from shoal.types import Sampling
from until import until

PROMPT = [5, 6, 7, 8]


class Stepped:
    """An engine in its thread, and what comes out of it."""

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self.steps = 0
        self.finished: list[Request] = []
        self.crashes: list[BaseException] = []
        self.thread = EngineThread(engine, deliver=self._deliver, crashed=self.crashes.append)

    def _deliver(self, finished: list[Request]) -> None:
        self.steps += 1
        self.finished += finished


@pytest.fixture
def stepped(tiny_model_dir: Path) -> Iterator[Stepped]:
    torch.set_num_threads(1)
    found = Stepped(StepEngine(load_model(tiny_model_dir), EngineLimits(128, max_running=4)))
    found.thread.start()
    yield found
    found.thread.stop()
    assert found.crashes == []


def test_what_a_caller_has_called_fails_to_that_caller_alone(stepped: Stepped) -> None:
    request = Request(PROMPT, Sampling(5))
    stepped.thread.call(lambda: stepped.engine.submit(request)).result(10)
    with pytest.raises(ZeroDivisionError):
        stepped.thread.call(lambda: 1 // 0).result(10)
    asyncio.run(until(lambda: stepped.finished == [request]))


def test_a_request_that_cannot_begin_leaves_nothing_behind(stepped: Stepped) -> None:
    wrong = Request([2**70], Sampling(5))
    with pytest.raises(OverflowError):
        stepped.thread.call(lambda: stepped.engine.submit(wrong)).result(10)
    request = Request(PROMPT, Sampling(5))
    stepped.thread.call(lambda: stepped.engine.submit(request)).result(10)
    asyncio.run(until(lambda: stepped.finished == [request]))
    assert stepped.thread.call(lambda: stepped.engine.idle).result(10)


async def asked(server: EngineServer, path: str, query: str = "", body: object = None) -> tuple[int, Any]:
    """Status and JSON of a POST to the application itself, which can be cancelled as a server's shutdown does."""
    scope = {"type": "http", "method": "POST", "path": path, "query_string": query.encode(), "headers": []}
    told: list[MutableMapping[str, Any]] = []
    received = iter([{"type": "http.request", "body": json.dumps(body or {}).encode()}])

    async def receive() -> MutableMapping[str, Any]:
        for message in received:
            return message
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def send(message: MutableMapping[str, Any]) -> None:
        told.append(message)

    with contextlib.suppress(AttributeError):  # raised again once it is answered, for the log
        await server.app(scope, receive, send)
    return told[0]["status"], json.loads(b"".join(message.get("body", b"") for message in told))


async def test_a_caller_that_is_cancelled_while_it_waits_ends_nothing(tiny_model_dir: Path) -> None:
    crashes: list[BaseException] = []
    engine = StepEngine(load_model(tiny_model_dir), EngineLimits(128))
    server = EngineServer(engine, crashed=crashes.append)

    async with server.app.router.lifespan_context(server.app):
        engine.pause(PauseMode.KEEP)
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 60}}
        drawing = asyncio.create_task(asked(server, "/inference/v1/generate", body=body))
        await until(lambda: engine.info().waiting == 1)
        held = threading.Event()
        server._thread.call(held.wait)  # so that it takes both pauses before its next step
        waiting = asyncio.create_task(asked(server, "/pause", "mode=wait"))
        keeping = asyncio.create_task(asked(server, "/pause", "mode=keep"))  # what the other waits for does not come
        await asyncio.sleep(0)
        held.set()
        await keeping
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asked(server, "/resume")
        _, answer = await drawing
        assert len(answer["choices"][0]["token_ids"]) == 60
        assert crashes == []


def test_weights_that_wait_for_answers_that_stand_still_cost_no_steps(tiny_model_dir: Path) -> None:
    stepped = Stepped(
        StepEngine(load_model(tiny_model_dir), EngineLimits(128, max_running=4), on_update=OnUpdate.DRAIN)
    )
    engine, call = stepped.engine, stepped.thread.call
    weights = engine.slots.staged(1, tiny_model_dir, None)
    request = Request(PROMPT, Sampling(60))
    engine.submit(request)
    for _ in range(3):
        engine.step()
    engine.pause(PauseMode.KEEP)
    stepped.thread.start()
    served = call(lambda: engine.update(weights)).result(10)
    steps = stepped.steps
    for _ in range(10):  # after each call the thread steps unless it has nothing to do
        call(lambda: None).result(10)
    assert stepped.steps == steps
    assert (engine.version, engine.idle, served.done()) == (0, True, False)
    call(engine.resume).result(10)
    assert served.result(10) == engine.version == 1
    asyncio.run(until(lambda: stepped.finished == [request]))
    assert request.drafts[0].versions == [0] * 60
    stepped.thread.stop()


def test_weights_that_wait_are_served_when_what_they_wait_for_is_aborted_in_a_pause(tiny_model_dir: Path) -> None:
    engine = StepEngine(load_model(tiny_model_dir), EngineLimits(128), on_update=OnUpdate.DRAIN)
    engine.submit(Request(PROMPT, Sampling(60)))
    engine.step()
    engine.pause(PauseMode.KEEP)
    served = engine.update(engine.slots.staged(1, tiny_model_dir, None))
    assert engine.idle
    engine.abort()
    assert not engine.idle
    engine.step()
    assert (served.result(0), engine.idle, engine.paused) == (1, True, True)


def test_what_nobody_expected_is_answered_as_json_that_says_what_went_wrong(tiny_model_dir: Path) -> None:
    engine = StepEngine(load_model(tiny_model_dir), EngineLimits(128))
    server = EngineServer(engine, crashed=lambda _: None)
    status, answer = asyncio.run(asked(server, "/resume"))  # its thread was never started
    message = "AttributeError: 'EngineServer' object has no attribute '_thread'"
    assert (status, answer) == (500, {"error": {"message": message, "code": 500}})
