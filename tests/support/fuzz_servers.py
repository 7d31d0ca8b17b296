"""Hostile requests against every server of Shoal: `python tests/support/fuzz_servers.py 100000`.

The gateway, the task server, the human page, the judge and the view run in one process, the engine
in its own as always; all with their real applications over real HTTP. `fuzz_attack` says what is sent.
"""

import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
from starlette.types import ASGIApp

import engine_server
from benchmarks.memory_swarm import MemorySwarm
from benchmarks.processes import commit
from chat_templates import renderer
from fuzz_attack import Attack, Target
from fuzz_bodies import CHAT, MESSAGES, RESPONSES
from gateway_engine import streamed
from shoal import wire
from shoal.config import Config, RewardConfig, TaskConfig
from shoal.gateway.server import Gateway
from shoal.interfaces import EngineInfo, LogitRules, ServedToken, ServedTokens
from shoal.net.identity import Identity
from shoal.net.server import serving
from shoal.observe.metrics import watched
from shoal.observe.view.server import ViewServer
from shoal.reward.service import RewardService
from shoal.run.demo_model.architecture import Shape, save, untrained
from shoal.swarm.human.human_node import HumanNode, QuestionPace
from shoal.swarm.human.server import HumanServer, Rates
from shoal.swarm.judge.judging import WIRE, Judge, JudgeServer, Rules
from shoal.swarm.judge.messages import Challenge, ChallengeRequest, Condition, opened, signed
from shoal.swarm.judge.store import JudgeStore
from shoal.swarm.peer import Joined
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.tasks.jsonl import JsonlService
from shoal.tasks.procedural_client import ProceduralClient, Spec
from shoal.tasks.remote_environment import TaskServer
from shoal.types import Completion, FinishReason, Sampling, Split
from view_run import MadeRun

CONTEXT = 4096
CLIENTS = 2
"""Of each server."""
WARMING = 5_000
"""Requests after which memory is measured, at most."""
FAST = 1e9
"""Requests per second, where there is a rate: what is refused for its haste is not tested."""
HERE, ME = Identity.fresh(), Identity.fresh()
SUMS = Spec("chain_sum", '{"max_digits": 1, "max_terms": 2, "min_digits": 1, "min_terms": 2}')


class BabblingEngine:
    """Implements `interfaces.Engine`: any tokens at all, special ones too, as often as not in a tool call."""

    def __init__(self, vocabulary: int, call_ids: Sequence[int], stop: int) -> None:
        self._vocabulary, self._call_ids, self._stop = vocabulary, call_ids, stop

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, priority: int = 0, session: str = ""
    ) -> list[Completion]:
        dice = random.Random(len(prompt_ids))
        await asyncio.sleep(dice.choice([0, 0, 0.01]))
        ids = [dice.randrange(self._vocabulary) for _ in range(dice.randrange(8))]
        ids += [*self._call_ids, self._stop] if dice.random() < 0.5 else [self._stop]
        finish = FinishReason.STOP if len(ids) <= sampling.max_tokens else FinishReason.LENGTH
        ids = ids[: sampling.max_tokens]
        return [Completion(tuple(ids), (-1.0,) * len(ids), (0,) * len(ids), finish)]

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, rules: LogitRules, *, every: int
    ) -> AsyncGenerator[ServedTokens, None]:
        return streamed(self, prompt_ids, sampling, every)

    async def prompt_logprobs(self, token_ids: Sequence[int], top: int) -> list[ServedToken]:
        return [ServedToken(token, -1.0, ((token, -1.0),) * min(top, 1)) for token in token_ids[1:]]

    async def update_weights(self, version: int, path: Path) -> None:
        raise NotImplementedError

    async def info(self) -> EngineInfo:
        return EngineInfo(0, "", CONTEXT, 0.0, 0, 0, 0, 0, 0)


def gateway_target() -> Target:
    """Three protocols, in sessions and without."""
    stream = {"stream": True}
    bodies: dict[str, Any] = {
        "/v1/chat/completions": CHAT,
        "/v1/responses": RESPONSES,
        "/v1/messages": MESSAGES,
        "/v1/messages/count_tokens": MESSAGES,
        "/v1/completions": {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5, "echo": False, "logprobs": None},
        "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5, "temperature": 1.0}},
    }
    session = {
        "sampling": {"max_tokens": 9, "temperature": 1.0, "stop_token_ids": [1]},
        "limits": {"generations": 5, "age_s": 10.0},
    }
    posts = {**bodies, "/v1/sessions": session}
    for path, body in bodies.items():
        posts["/s/{token}" + path] = body
        posts["/s/{token}" + path + "?again"] = {**body, **stream}

    async def renew(http: aiohttp.ClientSession, url: str, known: Mapping[str, str]) -> dict[str, str]:
        if known:
            async with http.post(f"{url}/s/{known['token']}/end") as answer:
                await answer.read()
        async with http.post(f"{url}/v1/sessions", json={}) as answer:
            return {"token": (await answer.json())["api_key"]}

    return Target(posts, ["/v1/models", "/health", "/metrics", "/s/{token}/v1/models"], renew=renew)


def engine_target(token: str) -> Target:
    """The routes that control it too."""
    drawn = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 5, "temperature": 1.0, "n": 2, "seed": 3}}
    posts = {
        "/inference/v1/generate": {**drawn, "request_id": "r", "priority": 1},
        "/score": {"token_ids": [5, 6, 7, 8]},
        "/abort_requests": {},
        "/update_weights": {"version": 1, "path": "/tmp/nothing", "checksum": "x"},
        "/resume": {},
    }
    gets = ["/health", "/metrics", "/info", "/weight_info", "/is_paused"]
    return Target(posts, gets, {"Authorization": f"Bearer {token}"})


def tasks_target(token: str) -> Target:
    """What a worker asks before its WebSocket."""
    return Target({}, ["/v1/status", "/v1/roles", "/v1/join"], {"Authorization": f"Bearer {token}"})


def human_target() -> Target:
    """A browser that reads no page."""
    posts = {"/api/question": {"pass": None}, "/api/answer": {"question": "{id}", "text": "a"}}

    async def renew(http: aiohttp.ClientSession, url: str, before: Mapping[str, str]) -> dict[str, str]:
        async with http.post(f"{url}/api/question", json={}) as answer:
            said = await answer.json()
        found = said.get("id") or (said.get("question") or {}).get("id") if isinstance(said, dict) else None
        return {"id": str(found or "x")}

    gets = ["/", "/style.css", "/desk.js", "/api/state/{id}", "/api/status"]
    return Target(posts, gets, renew=renew)


def judge_target() -> Target:
    """Messages with a true signature over what they should not say."""
    asked = {"judge": HERE.peer_id, "model": "m", "arm": "solo", "round": 7, "sent_s": time.time()}
    posts = {
        "/challenge": {"kind": "ChallengeRequest", **asked},
        "/verdict": {"kind": "Answers", "judge": HERE.peer_id, "challenge": "{challenge}", "texts": ["1", "2"]},
    }

    def encode(body: Any, dice: random.Random) -> bytes:
        message = dict(body) if isinstance(body, dict) else {"message": body}
        kind = str(message.pop("kind", "Answers")).encode(errors="replace")
        if "sent_s" in message and dice.random() < 0.8:
            message["sent_s"] = time.time()
        author = ME if dice.random() < 0.5 else Identity.fresh()
        try:
            inner = wire.encode(message)
        except (UnicodeEncodeError, OverflowError, msgspec.MsgspecError):  # what no message can say
            inner = secrets.token_bytes(40)
        signature = author.sign(b"shoal judge\x00" + kind + b"\x00" + inner)
        return wire.encode({"author": author.public_key, "signature": signature, "body": inner})

    gets = ["/", "/style.css", "/leaderboard.json", "/ledger", "/sittings/{number}/0", "/sittings/0/{number}"]

    async def renew(http: aiohttp.ClientSession, url: str, before: Mapping[str, str]) -> dict[str, str]:
        asking = signed(ME, ChallengeRequest(HERE.peer_id, "m", Condition.SOLO, 7, time.time()))
        async with http.post(f"{url}/challenge", data=asking, headers={"Content-Type": WIRE}) as answer:
            said = await answer.read()
        number = {"number": str(random.Random(said).randrange(-3, 10**9))}
        return {**number, "challenge": opened(said, Challenge)[1].id} if answer.status == 200 else {**number, **before}

    return Target(posts, gets, media_type=WIRE, encode=encode, renew=renew)


def view_target() -> Target:
    """Pages only."""
    pages = [
        "/",
        "/waits",
        "/swarm",
        "/heldout",
        "/question?id={name}",
        "/cost?gpu_hour={name}",
        "/charts/overview",
        "/charts/{name}",
        "/static/{name}",
        "/static/plotly.min.js",
    ]

    async def renew(http: aiohttp.ClientSession, url: str, before: Mapping[str, str]) -> dict[str, str]:
        return {"name": "waits"}

    return Target({}, [*pages, "/waits?run={name}", "/charts/waits?since={name}"], renew=renew)


@asynccontextmanager
async def applications(folder: Path) -> AsyncIterator[dict[str, ASGIApp]]:
    """All but the engine's, by name."""
    made = renderer("qwen3")
    call_ids = made.token_ids('<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>')
    babbling = BabblingEngine(max(call_ids), call_ids, made.stop_token_ids[0])
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"say {c}", "answer": c}) for c in "abcdefghijkl"))
    options = {"scorer": "exact", "eval_share": 0.4}
    task = TaskConfig.model_validate({"name": "letters", "service": "jsonl", "path": str(data), **options})
    service = JsonlService(task, 0)
    async with AsyncExitStack() as stack:
        rewards = await stack.enter_async_context(RewardService(RewardConfig(timeout_s=1.0)))
        drawer = stack.enter_context(ProceduralClient())
        book = JudgeStore(folder)
        stack.callback(book.close)
        judge = Judge(book, HERE, [SUMS], drawer, rewards, Rules(each=2))
        own = OwnTasks([service])
        stack.callback(own.close)
        joined = Joined(MemorySwarm().join(), own, HERE, folder, Config(tasks=[task]))
        human = HumanNode(joined, rewards, partial(service.draw, Split.TRAIN), QuestionPace(answers=2, wait_s=1))
        running = asyncio.create_task(human.run())
        stack.callback(running.cancel)
        (folder / "run").mkdir()
        run = MadeRun(folder / "run")
        await run.step()
        await run.close()
        yield {
            "gateway": Gateway(babbling, made, max_model_len=CONTEXT, model="m", model_server=babbling).app,
            "tasks": TaskServer(["made"], token="t").app,
            "human": HumanServer(human, Rates(time.monotonic, user_per_s=FAST, burst=FAST)).app,
            "judge": JudgeServer(judge).app,
            "view": ViewServer(watched([folder / "run"]), folder).app,
        }


async def serve(folder: Path) -> None:
    """Says on standard output where each is, then serves until standard input ends."""
    async with AsyncExitStack() as stack:
        urls = {}
        for name, app in (await stack.enter_async_context(applications(folder))).items():
            urls[name] = await stack.enter_async_context(serving(app, grace_s=1))
        sys.stdout.write(json.dumps(urls) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


@contextmanager
def targets(only: Sequence[str] = ()) -> Iterator[dict[str, tuple[str, Target, psutil.Process]]]:
    """Starts the servers; gives the URL, the target and the process of each, or of some."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save(untrained(Shape(width=32, heads=2, feed_forward=64, context=256), 0), folder / "model")
        engine = stack.enter_context(engine_server.serving(folder / "model"))
        child = stack.enter_context(
            subprocess.Popen(
                [sys.executable, __file__, "--serve", str(folder)],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert child.stdout is not None
        assert child.stdin is not None
        stack.callback(child.stdin.close)
        urls = {**json.loads(child.stdout.readline()), "engine": engine.url}
        made = {
            "gateway": gateway_target(),
            "engine": engine_target(engine.token),
            "tasks": tasks_target("t"),
            "human": human_target(),
            "judge": judge_target(),
            "view": view_target(),
        }
        servers, own = psutil.Process(child.pid), psutil.Process(engine.pid)
        yield {
            name: (urls[name], target, own if name == "engine" else servers)
            for name, target in made.items()
            if not only or name in only
        }


def fuzz(requests: int, seed: int = 0, only: Sequence[str] = ()) -> dict[str, Any]:
    """What became of so many requests to all servers together, and their memory before, half-way and after."""
    began_s = time.monotonic()
    with targets(only) as served:
        chosen = {name: (url, target) for name, (url, target, _) in served.items()}
        processes = {"engine" if name == "engine" else "servers": process for name, (_, _, process) in served.items()}
        asyncio.run(attacked(chosen, min(requests // 3, WARMING), seed + 1))  # what is loaded and cached once
        before = _memory(processes)
        attacks = asyncio.run(attacked(chosen, requests - requests // 2, seed))
        half = _memory(processes)
        attacks += asyncio.run(attacked(chosen, requests // 2, seed + 2))
        after = _memory(processes)
    return {
        "commit": commit(),
        "requests": sum(attack.statuses.total() for attack in attacks),
        "servers": {name: _statuses(attack for attack in attacks if attack.name == name) for name in chosen},
        "found": [one for attack in attacks for one in attack.found],
        "rss_before_mb": before,
        "rss_half_mb": half,
        "rss_after_mb": after,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def _memory(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    return {name: round(process.memory_info().rss / 1e6, 1) for name, process in processes.items()}


def _statuses(attacks: Any) -> dict[str, int]:
    total = sum((attack.statuses for attack in attacks), Counter[int]())
    return {str(status): count for status, count in sorted(total.items())}


async def attacked(chosen: Mapping[str, tuple[str, Target]], requests: int, seed: int) -> list[Attack]:
    """All servers at once, each by some clients."""
    attacks = [
        Attack(name, url, target, random.Random(f"{seed} {name} {i}"))
        for name, (url, target) in chosen.items()
        for i in range(CLIENTS)
    ]
    each, more = divmod(requests, len(attacks))
    await asyncio.gather(*(attack.run(each + (index < more)) for index, attack in enumerate(attacks)))
    return attacks


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        asyncio.run(serve(Path(sys.argv[2])))
    else:
        report = fuzz(int(sys.argv[1]), int((sys.argv[2:3] or ["0"])[0]), sys.argv[3:])
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        sys.exit(bool(report["found"]))
