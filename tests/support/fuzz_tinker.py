"""Hostile requests to a running Tinker server: `python tests/support/fuzz_tinker.py 20000`.

One key attacks: bodies of every route with values put where they do not belong, tensors of any shape, order and
repetition, models that were refused or unloaded. A client of another key trains and samples beside it with the real
package, again and again the same: it must see no error, no other number and no new process. The server is killed and
started again in between. `fuzz_attack` says how bodies are spoilt.
"""

import asyncio
import json
import random
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from benchmarks.processes import commit
from fuzz_attack import Attack, Target
from shoal.run.demo_model.architecture import Shape, save, untrained
from tinker_clients import TIMEOUT_S, TOKENS, client_of, datum, logprobs, stepped, trained
from tinker_server import KEYS, TinkerServer, tinker_serving
from train_runs import children
from until import until

CLIENTS = 2
API = "/api/v1/"
ABOUT = 1e-4
"""Nats by which the neighbour's numbers may differ: sums of float32 depend on what is computed beside them."""
ORDER = "{order}"
"""In a body: a number that no request had before, or now and then one that an earlier request had."""
UNSAYABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
"""Errors of a message's field that cannot be what it should."""
KINDS = {2: np.int64, 3: np.int32}
PARAMS = {"max_tokens": 3, "seed": 3, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop": None}
DENSE = {"dtype": 2, "shape": [6], "dense": [41, 42, 50, 51, 43, 60]}
SPARSE = {"dtype": 2, "shape": [6, 9], "crow": [0, 1, 2, 2, 2, 2, 3], "columns": [0, 4, 8], "values": [41, 42, 60]}


def floats(value: float) -> dict[str, Any]:
    return {"dtype": 1, "shape": [6], "dense": [value] * 6}


def gradients(loss: str = "cross_entropy", targets: Mapping[str, Any] = DENSE, **inputs: Any) -> dict[str, Any]:
    row = {"tokens": TOKENS[:-1], "inputs": {"target_tokens": targets, **inputs}}
    return {
        "model_id": "{model}",
        "seq_id": ORDER,
        "data": [row, row],
        "loss_fn": loss,
        "config": {},
        "forward_only": False,
        "@proto": True,
    }


POLICY = {"logprobs": floats(-1.0), "advantages": floats(1.0), "sequence_ratio_mask": floats(1.0)}
POSTS: dict[str, Any] = {
    "create_session": {"tags": [], "user_metadata": None, "sdk_version": "0.38.0", "type": "create_session"},
    "session_heartbeat": {"session_id": "{session}"},
    "create_model": {
        "session_id": "{session}",
        "model_seq_id": ORDER,
        "base_model": "tiny",
        "lora_config": {"rank": 2, "seed": 1, "train_mlp": True, "train_attn": True},
        "optimizer_config": {"type": "adamw"},
    },
    "unload_model": {"model_id": "{other}"},
    "get_info": {"model_id": "{model}"},
    "forward_backward": gradients(weights=floats(1.0)),
    "forward_backward?listed": gradients(targets=SPARSE, weights={**SPARSE, "dtype": 1}),
    "forward_backward?policy": gradients("ppo", **POLICY, versions=floats(0.0)),
    "forward_backward?sequence": gradients("gspo", **POLICY),
    "forward_backward?refused": gradients(weights=floats(1.0)) | {"model_id": "{other}"},
    "optim_step": {"model_id": "{model}", "seq_id": ORDER, "adam_params": {
        "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 1.0,
    }},
    "optim_step?huge": {"model_id": "{model}", "seq_id": ORDER, "adam_params": {"learning_rate": 1e3}},
    "save_weights": {"model_id": "{model}", "seq_id": ORDER, "path": "x", "ttl_seconds": 9, "overwrite": True},
    "save_weights?unfinished": {"model_id": "{model}", "seq_id": ORDER, "path": "x.unfinished", "overwrite": True},
    "save_weights_for_sampler": {"model_id": "{model}", "seq_id": ORDER, "path": "y", "ttl_seconds": 9},
    "save_weights_for_sampler?unnamed": {"model_id": "{model}", "seq_id": ORDER, "sampling_session_seq_id": ORDER},
    "load_weights": {"model_id": "{model}", "seq_id": ORDER, "path": "{path}", "optimizer": True},
    "load_weights?new": {
        "session_id": "{session}", "model_seq_id": ORDER, "path": "{path}", "optimizer": False, "base_model": "tiny"
    },
    "create_sampling_session": {"session_id": "{session}", "sampling_session_seq_id": ORDER, "base_model": "tiny"},
    "create_sampling_session?saved": {
        "session_id": "{session}", "sampling_session_seq_id": ORDER, "model_path": "{served}"
    },
    "asample": {
        "sampling_session_id": "{sampler}",
        "seq_id": ORDER,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:2]}]},
        "sampling_params": PARAMS,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 2,
        "target_prompt_logprobs": {"data": [7, 8], "dtype": "int64", "shape": [1, 2]},
        "prompt_logprobs_last_n": 1,
    },
    "asample?listed": {
        "sampling_session_id": "{sampler}",
        "seq_id": ORDER,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:3]}]},
        "sampling_params": {**PARAMS, "stop": ["a"]},
        "target_prompt_logprobs": {
            "data": [7, 8], "dtype": "int64", "shape": [2, 9],
            "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 8],
        },
    },
    "retrieve_future": {"request_id": "{future}"},
    "cancel_future": {"request_id": "{future}"},
    "weights_info": {"tinker_path": "{path}"},
    "sessions/{session}/finish": {},
    "training_runs/{model}/checkpoints/weights/x/ttl": {"ttl_seconds": 3600},
    "telemetry": {"session_id": "{session}", "events": []},
}  # fmt: skip
GETS = [
    "healthz",
    "get_server_capabilities",
    "samplers/{sampler}",
    "sequences/{future}/0",
    "sessions",
    "sessions/{session}",
    "training_runs",
    "training_runs?offset={session}",
    "training_runs/{model}",
    "training_runs/{model}/checkpoints",
    "checkpoints",
]


def numbers(given: Any, kind: Any, dice: random.Random) -> bytes:
    """Bytes of a tensor; any bytes for what is no list of numbers."""
    if isinstance(given, bytes):
        return given
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(given, kind).tobytes()
    except (ValueError, TypeError, OverflowError):
        return bytes(dice.choices(range(256), k=dice.choice([0, 3, 8, 24, 100])))


def tensor(given: Any, dice: random.Random) -> pb.Tensor:
    message = pb.Tensor()
    if not isinstance(given, dict):
        return message
    kind = KINDS.get(given.get("dtype") if isinstance(given.get("dtype"), int) else 0, np.float32)
    with suppress(*UNSAYABLE):
        message.dtype = given["dtype"]
    with suppress(*UNSAYABLE):
        message.shape.extend(given["shape"])
    if "dense" in given:
        message.dense = numbers(given["dense"], kind, dice)
    if "values" in given or "crow" in given:
        message.sparse_csr.values = numbers(given.get("values"), kind, dice)
        message.sparse_csr.crow_indices = numbers(given.get("crow"), np.int64, dice)
        message.sparse_csr.col_indices = numbers(given.get("columns"), np.int64, dice)
    return message


def proto(given: Mapping[str, Any], dice: random.Random | None = None) -> bytes:
    """ForwardBackwardRequest of a body, as far as a message can say it; with dice also what no body says."""
    message, dice, plain = pb.ForwardBackwardRequest(), dice or random.Random(0), dice is None
    for name in ("model_id", "seq_id", "loss_fn", "forward_only"):
        with suppress(*UNSAYABLE):
            setattr(message, name, given[name])
    with suppress(*UNSAYABLE):
        for key, value in given["config"].items():
            message.loss_fn_config[key] = value
    for name in ("max_staleness", "clip_low_threshold", "beta"):
        if not plain and dice.random() < 0.03:
            value = message.loss_fn_config_v2[name]
            value.text, value.number = "x", dice.choice([float("nan"), float("inf"), -1.0, 1e308])
    for row in given.get("data") if isinstance(given.get("data"), list) else ():
        one = message.data.add()
        if isinstance(row, dict):
            one.model_input.add().encoded_text.tokens = numbers(row.get("tokens"), np.int32, dice)
            with suppress(*UNSAYABLE):
                for key, value in row["inputs"].items():
                    one.loss_fn_inputs[key].CopyFrom(tensor(value, dice))
    return bytes(message.SerializeToString())


def target(key: str) -> Target:
    """Routes of the API, for the client with a key."""
    orders = count(1)

    def ordered(value: Any, dice: random.Random) -> Any:
        if isinstance(value, dict):
            return {name: ordered(part, dice) for name, part in value.items()}
        if value != ORDER:
            return value
        order = next(orders)
        return dice.randrange(order + 1) if dice.random() < 0.1 else order

    def encode(body: Any, dice: random.Random) -> bytes:
        body = ordered(body, dice)
        if isinstance(body, dict) and "@proto" in body:
            return proto(body, dice)
        return json.dumps(body).encode()

    async def renew(http: aiohttp.ClientSession, url: str, known: Mapping[str, str]) -> dict[str, str]:
        """A new session with a model, an unloaded one, a sampler and two checkpoints; the old one is left as it is."""

        async def asked(route: str, **fields: Any) -> dict[str, Any]:
            async with http.post(url + API + route, json=fields, headers={"X-API-Key": key}) as answer:
                said = await answer.read()
                assert answer.status < 500, (route, said)
                return dict(json.loads(said or b"{}"))

        async def resulted(route: str, **fields: Any) -> dict[str, Any]:
            said = await asked(route, **fields)
            while True:
                result = await asked("retrieve_future", request_id=said["request_id"])
                if result.get("type") != "try_again":
                    return {**result, **said}

        if known:
            await asked(f"sessions/{known['session']}/finish")
        session = str((await asked("create_session", **POSTS["create_session"]))["session_id"])
        adapter = {"rank": 2, "seed": 1}
        models = [
            await resulted("create_model", session_id=session, model_seq_id=n, base_model="tiny", lora_config=adapter)
            for n in (10**6, 10**6 + 1)
        ]
        model, other = (str(one["model_id"]) for one in models)
        await asked("unload_model", model_id=other)
        kept = await resulted("save_weights", model_id=model, seq_id=10**8, path="kept")
        served = await resulted("save_weights_for_sampler", model_id=model, seq_id=10**8 + 1, path="served")
        sampler = await asked(
            "create_sampling_session", session_id=session, sampling_session_seq_id=10**6, model_path=served["path"]
        )
        future = f"{sampler['sampling_session_id']}/{random.Random(session).randrange(9)}"
        names = {"session": session, "model": model, "other": other, "future": future}
        return {**names, "sampler": sampler["sampling_session_id"], "path": kept["path"], "served": served["path"]}

    posts = {API + route: body for route, body in POSTS.items()}
    return Target(posts, [API + route for route in GETS], {"X-API-Key": key}, encode=encode, renew=renew)


@dataclass
class Neighbour:
    """A client that trains and samples the same again and again, in a thread; `seen` is what it should not have."""

    server: TinkerServer
    rounds: int = 0
    seen: list[str] = field(default_factory=list)
    worst_wait_s: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Lets it work for as long as the block lasts, at least one round before and one after."""
        with client_of(self.server, KEYS[0]) as service:
            sampler = service.create_sampling_client(base_model="tiny").result(TIMEOUT_S)
            self._wanted = self._round(service, sampler)
            working = threading.Thread(target=self._work, args=(service, sampler), daemon=True)
            waiting = threading.Thread(target=self._wait, daemon=True)
            working.start()
            waiting.start()
            try:
                yield
            finally:
                self._over.set()
                working.join(TIMEOUT_S)
                waiting.join(TIMEOUT_S)

    def _round(self, service: tinker.ServiceClient, sampler: tinker.SamplingClient) -> list[float]:
        client = trained(service)
        losses = stepped(client, 2)
        client.forward_backward([datum()], "cross_entropy").result(TIMEOUT_S)
        prompt, params = types.ModelInput.from_ints(TOKENS[:2]), types.SamplingParams(max_tokens=4, seed=3)
        (sequence,) = sampler.sample(prompt, 1, params).result(TIMEOUT_S).sequences
        learnt = logprobs(client)
        unloaded, headers = {"model_id": client.model_id}, {"X-API-Key": KEYS[0]}
        with suppress(httpx.TransportError):  # it is being killed
            httpx.post(f"{self.server.url}{API}unload_model", json=unloaded, headers=headers)
        return [*losses, *learnt, *map(float, sequence.tokens), *(sequence.logprobs or [])]

    def _work(self, service: tinker.ServiceClient, sampler: tinker.SamplingClient) -> None:
        while True:
            last = self._over.is_set()
            try:
                found = self._round(service, sampler)
            except (tinker.TinkerError, httpx.HTTPError, TimeoutError) as error:
                self.seen.append(f"{type(error).__name__}: {error}")
                return
            if len(found) != len(self._wanted) or not np.allclose(found, self._wanted, rtol=0, atol=ABOUT):
                self.seen.append(f"expected {self._wanted}, got {found}")
            self.rounds += 1
            if last:
                return

    def went_on(self, rounds: int) -> bool:
        """Whether it has done more than so many rounds, or will do none any more."""
        return self.rounds > rounds or bool(self.seen)

    def _wait(self) -> None:
        with httpx.Client(timeout=TIMEOUT_S) as http:
            while not self._over.wait(0.05):
                began = time.monotonic()
                try:
                    http.get(f"{self.server.url}{API}healthz")
                except httpx.TransportError:
                    continue  # it is being killed
                self.worst_wait_s = max(self.worst_wait_s, time.monotonic() - began)


def attacked(server: TinkerServer, requests: int, seed: int) -> list[Attack]:
    """So many requests by some clients at once."""

    async def run() -> list[Attack]:
        attacks = [Attack("tinker", server.url, target(KEYS[1]), random.Random(f"{seed} {i}")) for i in range(CLIENTS)]
        await asyncio.gather(*(attack.run(requests // CLIENTS) for attack in attacks))
        return attacks

    return asyncio.run(run())


def processes(server: TinkerServer) -> set[int]:
    return {child.pid for name in ("shoal.trainer.worker", "shoal.engine") for child in children(server.process, name)}


def fuzz(requests: int, seed: int = 0, kills: int = 2) -> dict[str, Any]:
    """What became of so many requests, with as many kills in between, and what the neighbour saw."""
    began_s, attacks, found = time.monotonic(), list[Attack](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(untrained(Shape(width=32, heads=2, feed_forward=64, context=64), 0), folder / "model")
        with tinker_serving(folder / "model", folder / "server") as server:
            neighbour = Neighbour(server)
            with neighbour.beside():
                for part in range(kills + 1):
                    before = processes(server)
                    attacks += attacked(server, requests // (kills + 1), seed * 1000 + part)
                    if gone := before - processes(server):
                        found.append(f"part {part}: processes {gone} ended")
                    if part < kills:
                        server.kill()
                        server.start_again()
                        rounds = neighbour.rounds
                        asyncio.run(until(partial(neighbour.went_on, rounds), TIMEOUT_S))
            kinds = ended(folder / "server" / "server.sqlite")
        log = (folder / "server" / "trainer.log").read_text()
    found += [one for attack in attacks for one in attack.found] + neighbour.seen
    found += [f"not the client's fault: {words}" for words in kinds.pop("server", [])]
    statuses = sum((attack.statuses for attack in attacks), Counter[int]())
    return {
        "commit": commit(),
        "requests": statuses.total(),
        "statuses": {str(status): number for status, number in sorted(statuses.items())},
        "futures": {name: len(those) for name, those in kinds.items()},
        "found": found,
        "trainer_log": log[-2000:],
        "neighbour": {"rounds": neighbour.rounds, "worst_wait_s": round(neighbour.worst_wait_s, 3)},
        "seconds": round(time.monotonic() - began_s, 1),
    }


def ended(path: Path) -> dict[str, Sequence[str]]:
    """Results of the stored requests, once none is pending: done, and errors of the client or of the server."""
    with closing(sqlite3.connect(path)) as store:
        query = "SELECT count(*) FROM requests WHERE state = 'pending'"
        asyncio.run(until(lambda: store.execute(query).fetchone() == (0,), TIMEOUT_S))
        rows = store.execute("SELECT state, result FROM requests").fetchall()
    kinds: dict[str, list[str]] = {"done": [], "user": [], "server": []}
    for state, result in rows:
        said = {"category": "done", "error": ""} if state == "done" else json.loads(result)
        kinds[said["category"]].append(said["error"])
    return dict(kinds)


if __name__ == "__main__":
    report = fuzz(int(sys.argv[1]), int((sys.argv[2:3] or ["0"])[0]))
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    sys.exit(bool(report["found"]))
