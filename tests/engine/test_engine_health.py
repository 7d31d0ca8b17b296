"""What an engine says of its health when the thread that computes hangs while HTTP goes on."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starlette.testclient import TestClient

from shoal.engine.compute.options import EngineLimits
from shoal.engine.compute.request import Request
from shoal.engine.compute.step_engine import StepEngine
from shoal.engine.server.routes import EngineServer
from shoal.model.loading import load_model


class HangingEngine(StepEngine):
    """Begins no step before it is let go."""

    let_go: threading.Event

    def step(self) -> list[Request]:
        assert self.let_go.wait(60)
        return super().step()


def status_comes(client: TestClient, status: int) -> str:
    """What `/health` says once it says it with this status."""
    deadline_s = time.monotonic() + 60
    while (answer := client.get("/health")).status_code != status:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return answer.text


def test_an_engine_whose_step_never_ends_is_not_well_and_an_idle_one_is(tiny_model_dir: Path) -> None:
    engine = HangingEngine(load_model(str(tiny_model_dir)), EngineLimits(64))
    engine.let_go = threading.Event()
    server = EngineServer(engine, crashed=lambda error: None, hung_s=0.1)
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}
    with TestClient(server.app, base_url="http://localhost") as client, ThreadPoolExecutor() as threads:
        time.sleep(0.2)  # longer than a step may take: what has nothing to do does not hang
        assert client.get("/health").status_code == 200
        answering = threads.submit(client.post, "/inference/v1/generate", json=body)
        assert "the engine hangs: it has been at one step for" in status_comes(client, 503)
        engine.let_go.set()
        assert answering.result().status_code == 200
        status_comes(client, 200)
