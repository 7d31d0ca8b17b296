"""An engine process for tests, and what several of them ask of it."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from shoal.engine.server.http_client import TOKEN_VARIABLE, HttpEngine
from shoal.engine.server.http_server import engine_of, options_of, server_of
from shoal.net.process import receive_frame, send_frame, torch_environment
from shoal.net.server import serving as net_serving
from shoal.weights.store import WeightStore

TOKEN = "the-engine-s-token"
PROMPT = [5, 6, 7, 8]


@dataclass(frozen=True)
class Server:
    url: str
    pid: int
    token: str

    def ask(self, path: str, body: object | None = None, raw: bytes | None = None) -> tuple[int, dict[str, object]]:
        """Status and JSON of a POST (with a body) or GET."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self.headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}

    def engine(self) -> aclosing[HttpEngine]:
        return aclosing(HttpEngine(self.url, token=self.token, timeout_s=60))


@contextmanager
def serving(model: Path, *arguments: str, weights: Path | None = None) -> Iterator[Server]:
    """A server process, ended at the end. It takes weights from that folder; from all temporary ones by default."""
    ours, theirs = socket.socketpair()
    given = ["--model", str(model), "--weights", str(weights or tempfile.gettempdir()), "--fd", str(theirs.fileno())]
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.engine.server.http_server", *given, *arguments],
        pass_fds=[theirs.fileno()],
        env=torch_environment(1),
    )
    theirs.close()
    try:
        with ours:
            send_frame(ours, TOKEN.encode())
            answer = receive_frame(ours)
        assert answer, "the server did not start"
        yield Server(answer[1].decode(), process.pid, TOKEN)
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def threaded(model: Path, *arguments: str, weights: Path | None = None) -> Iterator[Server]:
    """The same server in a thread of this process, for tests that need no other process: it starts at once."""
    options = options_of(["--model", str(model), "--weights", str(weights or tempfile.gettempdir()), *arguments])
    server = server_of(engine_of(options), options, TOKEN, lambda error: None)
    url, ending = Future[str](), Future[None]()

    async def serve() -> None:
        async with net_serving(server.app, idle_s=600, grace_s=1) as at:
            url.set_result(at)
            await asyncio.wrap_future(ending)
            server.stop()

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(asyncio.run, serve())
        try:
            yield Server(url.result(60), os.getpid(), TOKEN)
        finally:
            ending.set_result(None)
            served.result(60)


@contextmanager
def engine_here(model: Path, *arguments: str) -> Iterator[str]:
    """Setting of a run whose engine is a thread of this process: its own one would take seconds to start."""
    with threaded(model, *arguments) as server, pytest.MonkeyPatch.context() as environment:
        environment.setenv(TOKEN_VARIABLE, server.token)
        yield f'--engine.urls=["{server.url}"]'


def changed_weights(model: Path, store: WeightStore, version: int, factor: float = -1.0) -> Path:
    """Publishes the model's weights with another head as `version`."""
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * factor
    save_file(tensors, store.begin(version) / "model.safetensors")
    return store.seal(version).path


async def running(engine: HttpEngine, count: int) -> bool:
    return (await engine.info()).running == count


async def waiting(engine: HttpEngine, count: int) -> bool:
    return (await engine.info()).waiting == count
