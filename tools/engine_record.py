"""An engine with a record of all that it sampled, apart from the run that asks it; and the run's log against it."""

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import aiohttp
from aiohttp import web

from shoal.experience.log import snapshot
from shoal.experience.raw import RawRollout, decode_rollout, read_groups
from shoal.turn_tree import prompt_ids

GENERATE = "/inference/v1/generate"
STARTS_S = 300.0
Token: TypeAlias = tuple[int, float, int]
"""Id, logprob and Version of a sampled token."""


@dataclass
class Record:
    """What an engine sampled: its answers by their prompts."""

    url: str
    token: str
    answers: dict[tuple[int, ...], list[list[Token]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, asked: bytes, answered: bytes) -> None:
        """Records the answers of one request."""
        prompt = tuple(json.loads(asked)["token_ids"])
        for choice in json.loads(answered)["choices"]:
            versions = [
                span["version"] for span in choice["weight_versions"] for _ in range(span["start"], span["end"])
            ]
            tokens = choice["logprobs"]["content"]
            rows = zip(choice["token_ids"], tokens, versions, strict=True)
            self.answers[prompt].append([(token, said["logprob"], version) for token, said, version in rows])

    def has(self, prompt: tuple[int, ...], sampled: list[Token]) -> bool:
        """Whether the engine sampled these tokens after this prompt.

        One answer may be of several requests, one behind the other. A stop text may have cut the last one.
        """
        if not sampled:
            return True
        for answer in self.answers.get(prompt, ()):
            size = min(len(answer), len(sampled))
            if size and answer[:size] == sampled[:size]:
                ids = tuple(token for token, _, _ in sampled[:size])
                if self.has((*prompt, *ids), sampled[size:]):
                    return True
        return False


@contextlib.asynccontextmanager
async def recorded_engine(model: Path, weights: Path) -> AsyncIterator[Record]:
    """An engine of a model behind a proxy that records. It takes weights from that folder."""
    token = secrets.token_urlsafe(16)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shoal.engine.server.http_server", "--model", str(model), "--weights", str(weights)),
        *("--die-with-parent", "--threads", "1"),
        env={**os.environ, "SHOAL_ENGINE_TOKEN": token, "OMP_NUM_THREADS": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        target = await asyncio.wait_for(_announced(process), STARTS_S)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as client:
            record = Record("", token)

            async def passed(request: web.Request) -> web.Response:
                return await _passed(request, target, client, record)

            app = web.Application(client_max_size=1 << 28)
            app.router.add_route("*", "/{path:.*}", passed)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            record.url = f"http://{host}:{port}"
            try:
                yield record
            finally:
                await runner.cleanup()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _announced(process: asyncio.subprocess.Process) -> str:
    """URL that an engine says once it serves."""
    assert process.stderr is not None
    async for line in process.stderr:
        _, mark, url = line.decode().strip().partition("serving at ")
        if mark:
            return url
    raise RuntimeError("the engine ended before it served")


async def _passed(request: web.Request, target: str, client: aiohttp.ClientSession, record: Record) -> web.Response:
    """Passes a request on to the engine, and records its answer if it has one."""
    body = await request.read()
    headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
    async with client.request(request.method, f"{target}{request.path_qs}", data=body or None, headers=headers) as said:
        answer = await said.read()
        if request.path == GENERATE and said.status == 200:
            record.add(body, answer)
        return web.Response(body=answer, status=said.status, content_type=said.content_type)


def rollouts(run: Path) -> list[RawRollout]:
    """Rollouts in a run's log."""
    with snapshot(run) as connection:
        return [decode_rollout(body) for group in read_groups(connection) for body in group.bodies]


def compared(found: list[RawRollout], record: Record) -> tuple[int, int]:
    """Numbers of turns in the log, and of those whose prompt, tokens, logprobs and Versions are the engine's."""
    turns = equal = 0
    for rollout in found:
        for index, turn in enumerate(rollout.turns):
            one = turn.completion
            sampled = list(zip(one.token_ids, one.logprobs, one.versions, strict=True))
            turns += 1
            equal += record.has(prompt_ids(rollout.turns, index), sampled)
    return turns, equal
