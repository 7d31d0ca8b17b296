"""A run on engines and scorers of which one turns rogue: it goes on with the others, or is killed and resumes.

The rogue engine is a real one behind a proxy that changes its answers. Its weights, Versions and canaries are right.
"""

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from engine_server import TOKEN, Server, threaded
from shoal.cluster.registry import RewardsRole
from shoal.engine.server.http_client import TOKEN_VARIABLE
from shoal.experience.audit import audit
from shoal.net.client import TOKEN_VARIABLE as RUN_TOKEN
from shoal.net.joining import Answering, hold_lease
from shoal.net.listening import free_port
from train_runs import events, start
from until import until

FOR_LONG = ("--train.steps=100000", "--checkpoint.every_steps=5")
WRONG_REWARDS = [
    b"{",
    b'{"rewards": []}',
    b'{"rewards": [{"value": 1e999, "status": "scored", "parts": [], "evidence": ""}]}',
    b'{"rewards": [{"value": 0, "status": "failed", "parts": [], "evidence": "no"}]}',
]


@asynccontextmanager
async def served(answer: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    """URL of a server that answers every request so."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Rogue:
    """Proxy of an engine. Its lie is a function of path and answer."""

    def __init__(self, engine: Server, lie: Callable[[str, Any], Any]) -> None:
        self.engine, self.lie, self.lies = engine, lie, False

    async def answer(self, request: web.Request) -> web.Response:
        async with (
            ClientSession(headers=self.engine.headers) as session,
            session.request(
                request.method, f"{self.engine.url}{request.path_qs}", data=await request.read()
            ) as answered,
        ):
            body = await answered.json()
            return web.json_response(self.lie(request.path, body) if self.lies else body, status=answered.status)


def other_tokens(path: str, body: Any) -> Any:
    """Answers of the right form, with random tokens and logprobs that no model gave them."""
    if path == "/inference/v1/generate":
        for choice in body["choices"]:
            ends = choice["finish_reason"] == "stop"
            count = len(choice["token_ids"]) - ends
            choice["token_ids"][:count] = random.Random(0).choices(range(10, 60), k=count)
            tokens = choice["token_ids"]
            choice["logprobs"] = {"content": [{"token_id": token, "logprob": -1.0} for token in tokens]}
    return body


def frozen_version(path: str, body: Any) -> Any:
    """Its report of itself has the Version of the start for ever."""
    return {**body, "version": 0} if path == "/info" else body


def without_sets(path: str, body: Any) -> Any:
    """Answers that do not say which tokens could be sampled."""
    if path == "/inference/v1/generate":
        body["choices"] = [{**choice, "kept": []} for choice in body["choices"]]
    return body


async def scored(request: bytes) -> bytes:
    """An honest scorer by `contains`."""
    asked = json.loads(request)
    values = [float(asked["truth"] in answer) for answer in asked["answers"]]
    rewards = [{"value": value, "status": "scored", "parts": [], "evidence": ""} for value in values]
    return json.dumps({"rewards": rewards}).encode()


def joined(url: str, answer: Answering) -> "asyncio.Task[None]":
    """A scorer that joins a run, and answers so."""

    @asynccontextmanager
    async def work(_: object) -> AsyncIterator[Answering]:
        yield answer

    return asyncio.create_task(hold_lease(url, TOKEN, RewardsRole(), lambda sentence: None, work))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("lie", "why", "settings", "resumes"),
    [
        (other_tokens, "its logprobs differ", (), False),
        (frozen_version, "version: expected", (), True),
        (without_sets, "kept: expected", ("--rollout.top_k=40",), False),
    ],
)
def test_a_run_leaves_out_the_engine_that_turns_rogue_and_goes_on(
    lie: Callable[[str, Any], Any],
    why: str,
    settings: tuple[str, ...],
    resumes: bool,
    tmp_path: Path,
    tiny_model_dir: Path,
) -> None:
    wrong = itertools.cycle(WRONG_REWARDS)

    async def misscored(request: bytes) -> bytes:
        return next(wrong)

    def steps() -> int:
        metrics = tmp_path / "run" / "metrics.jsonl"
        return metrics.read_text().count('"kind":"step"') if metrics.exists() else 0

    async def run(honest: Server, behind: Server) -> None:
        rogue = Rogue(behind, lie)
        at = f"127.0.0.1:{free_port()}"
        scorers = [joined(f"http://{at}", answer) for answer in (misscored, scored)]
        given = {TOKEN_VARIABLE: TOKEN, RUN_TOKEN: TOKEN}
        async with served(rogue.answer) as url:
            where = [
                *settings,
                f'--engine.urls=["{honest.url}", "{url}"]',
                *("--reward.workers=0", f"--cluster.listen={at}"),
            ]
            process = start(tmp_path, tiny_model_dir, *FOR_LONG, *where, **given)
            await until(lambda: steps() >= 3 or process.poll() is not None, 240)
            rogue.lies = True
            await until(lambda: process.poll() is not None or f"{url}" in left_out(tmp_path / "run"), 240)
            assert process.poll() is None, process.communicate()[1]
            seen = steps()
            await until(lambda: steps() > seen + 3)
            process.kill()
            await asyncio.to_thread(process.communicate)
            if not resumes:
                return
            more = f"--train.steps={steps() + 10}"
            process = start(tmp_path, tiny_model_dir, "--resume", more, *where, **given)
            err = (await asyncio.to_thread(process.communicate, timeout=240))[1]
            assert process.returncode == 0, err
        for scorer in scorers:
            scorer.cancel()
        await asyncio.gather(*scorers, return_exceptions=True)

    with threaded(tiny_model_dir) as honest, threaded(tiny_model_dir) as behind:
        asyncio.run(run(honest, behind))
    report = audit(tmp_path / "run")
    assert report.ok, report.sentences()
    assert why in left_out(tmp_path / "run")
    assert events(tmp_path / "run").count("engine_lost") >= (3 if resumes else 1)


def left_out(run: Path) -> str:
    """The event that names an engine that is left out."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    reasons = [one["reason"] for one in records if one.get("name") == "engine_lost"]
    return next((reason for reason in reasons if "left out" in reason), "")
