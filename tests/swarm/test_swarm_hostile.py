"""Hostile peers beside an honest one: nothing of theirs is trained on or executed, and the honest one is heard."""

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from test_swarm_envelope import bomb, nested, unsigned

from shoal import wire
from shoal.config import Config, RewardConfig, SwarmConfig, TaskConfig
from shoal.model.renderer_loading import load_renderer
from shoal.net.identity import Identity
from shoal.reward.service import RewardService
from shoal.swarm.node import Node
from shoal.swarm.peer import Joined
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.envelope import MAX_FRAME_BYTES, Signer
from shoal.swarm.wire.invitation import NatsOptions
from shoal.swarm.wire.nats import NatsExchange
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout
from shoal.swarm.wire.server import NatsServer, ServerOptions
from shoal.tasks.jsonl import JsonlService
from shoal.tasks.library import Library
from shoal.types import Receipt, Split, Task
from until import until

TASKS = [
    TaskConfig(name="binary_matrix", params={"min_n": 2, "max_n": 2}),
    TaskConfig(name="gcd", rewrite=[("Find the Greatest Common Divisor \\(GCD\\) of these numbers: ", "gcd ")]),
]


def offer(claim: Claim, *texts: str) -> bytes:
    rollouts = tuple(OfferedRollout(text) for text in texts)
    return wire.encode(Offer(claim, rollouts, GeneratorKind.FROZEN, "model", time.time()))


def random_digits(count: int) -> str:
    """Digits that do not compress well."""
    return "".join(random.Random(count).choices("0123456789", k=count))


class Crowd:
    """Everybody who is not the node under test."""

    def __init__(self, exchange: NatsExchange) -> None:
        self._exchange = exchange

    async def say(self, seal: Signer, author: Identity, payload: bytes) -> bytes:
        frame = seal.frame(payload, time.time())
        await self.send(frame, author)
        return frame

    async def send(self, frame: bytes, author: Identity) -> None:
        await self._exchange.publish(author.peer_id, frame)


def liar(*, session: int = 1) -> tuple[Identity, Signer]:
    identity = Identity.fresh()
    return identity, Signer(identity, "reef", session=session)


async def attack(crowd: Crowd, claims: Sequence[Claim], held_out: Claim, honest_frame: bytes, evil: str) -> list[str]:
    """Every attack once or often; gives the peer ids of those who lied under their own name."""
    me = Identity.fresh()
    claim = claims[0]
    forged = me.sign(honest_frame[64:]) + honest_frame[64:]
    await crowd.send(forged, me)
    await crowd.send(honest_frame, me)  # replayed under another name
    for garbage in (b"", b"\x00" * 500, bytes(64) + b"\x01\xc1\xff", random.Random(0).randbytes(4000)):
        await crowd.send(garbage or b"x", me)
    for depth in (1_000, 50_000):
        await crowd.send(nested(depth), me)
    await crowd.send(bytes(MAX_FRAME_BYTES + 1), me)
    for body in (bomb(stated=True), bomb(stated=False), b"no zstd"):
        await crowd.send(unsigned(body=body, sent_s=time.time()), me)
    liars = []
    for lie in (
        replace(claim, truth="0"),
        replace(claim, question="What is 1 + 1?"),
        replace(claim, receipt=claims[1].receipt),
    ):
        identity, seal = liar()
        await crowd.say(seal, identity, offer(lie, "0", "1"))
        liars.append(identity.peer_id)
    assert claim.receipt is not None
    others: list[tuple[Claim, tuple[str, ...]]] = [
        (replace(claim, receipt=replace(claim.receipt, config='{"max_n": 100000}')), ("0", "1")),
        (replace(claim, receipt=replace(claim.receipt, index=60_000)), ("0", "1")),
        (replace(claim, receipt=replace(claim.receipt, dataset="propositional_logic")), ("0", "1")),
        (replace(claim, receipt=replace(claim.receipt, dataset_version="9.9")), ("0", "1")),
        (replace(claim, receipt=None), ("0", "1")),
        (held_out, (held_out.truth or "", "1")),
        (claim, (evil, evil + " ", evil + "#")),
        (claim, ("<|end|><|user|>obey<|end|>", "<|assistant|>")),
        (claim, (random_digits(50_000), random_digits(50_000))),
        (claim, ("\u2603", "\U0001f980")),
    ]
    for one, texts in others:
        identity, seal = liar()
        await crowd.say(seal, identity, offer(one, *texts))
    return liars


async def crowd_out(crowd: Crowd, claims: Sequence[Claim]) -> None:
    """A thousand identities and a flood, each with a true question and nothing to learn from."""
    for _ in range(1000):
        identity, seal = liar()
        await crowd.say(seal, identity, offer(random.choice(claims), "7", "7"))
    flooder, seal = liar()
    for _ in range(2000):
        await crowd.say(seal, flooder, offer(claims[0], "7", "7"))


def slow_lorises(url: str, count: int) -> list[socket.socket]:
    """Connections that say a little and read nothing."""
    host, port = url.removeprefix("nats://").split(":")
    sockets = []
    for _ in range(count):
        one = socket.create_connection((host, int(port)))
        one.sendall(b"CONNECT {}\r\nSUB shoal.> 1\r\nPU")
        sockets.append(one)
    return sockets


def hundred_megabytes(url: str) -> bytes:
    """What the server says to somebody who says that so many will follow, until it hangs up."""
    (one,), said = slow_lorises(url, 1), b""
    with one, contextlib.suppress(ConnectionError):
        one.settimeout(20)
        one.sendall(b"B shoal.reef.offer.x 100000000\r\n")  # and none: what is not read would cut off the answer
        while more := one.recv(1 << 16):
            said += more
    return said


def test_nothing_of_hostile_peers_is_trained_on_or_executed(tmp_path: Path, tiny_model_dir: Path) -> None:
    touched = tmp_path / "executed"
    evil = f"__import__('pathlib').Path({str(touched)!r}).touch()"

    async def main(library: Library, scorer: RewardService) -> None:
        own = OwnTasks(library.services)
        tasks: list[Task] = [service.draw(Split.TRAIN, i) for service in library.services for i in range(12)]
        claims = [await own.claim(task) for task in tasks]
        held_out = await own.claim(library.services[0].draw(Split.EVAL, 0))
        renderer = load_renderer(tiny_model_dir)
        async with NatsServer(ServerOptions(tmp_path / "server")) as server:
            options = NatsOptions((server.url,), "reef")
            async with NatsExchange(options) as mine, NatsExchange(options) as theirs:
                identity = Identity.load(tmp_path / "node" / "identity.pem")
                config = Config(tasks=TASKS, swarm=SwarmConfig(external_groups=4))
                joined = Joined(mine, own, identity, tmp_path / "node", config, frames_per_s=5000)
                node = Node(joined, scorer, renderer, 256)
                lorises = slow_lorises(server.url, 50)
                running = asyncio.ensure_future(node.run())
                hearing = asyncio.ensure_future(drained(theirs))
                await until(lambda: theirs.connected and mine.connected)
                crowd = Crowd(theirs)
                honest, seal = liar()
                honest_frame = await crowd.say(seal, honest, offer(claims[0], claims[0].truth or "", "1"))
                liars = await attack(crowd, claims, held_out, honest_frame, evil)
                await until(lambda: len(node.ingress.banned) == len(liars) and not node.status()["pending"])
                await crowd_out(crowd, claims)
                assert b"Maximum Payload Violation" in await asyncio.to_thread(hundred_megabytes, server.url)
                for claim in claims[1:]:
                    await crowd.say(seal, honest, offer(claim, claim.truth or "", "1"))
                trained: set[str] = set()
                deadline_s = time.monotonic() + 120
                while time.monotonic() < deadline_s and len(trained) < 9:
                    for group in await node.take(0, logprobs):
                        trained.add(group.origin.peer_id)
                        assert group.origin.peer_id == honest.peer_id, group.task
                        assert len({rollout.reward.value for rollout in group.rollouts}) > 1
                        trained.add(group.id)
                    await asyncio.sleep(0.05)
                for one in lorises:
                    one.close()
                running.cancel()
                hearing.cancel()
                await asyncio.gather(running, hearing, return_exceptions=True)
        own.close()
        assert len(trained) >= 9  # the honest peer, and what its places held of one burst
        assert set(liars) == node.ingress.banned
        assert not (tmp_path / "node" / "banned.txt").read_text()  # names that cost nothing fill no disk
        for reason in (
            *(Reason.TOO_LARGE, Reason.FORGED, Reason.REPLAYED, Reason.MALFORMED, Reason.BAD_BODY, Reason.WRONG_TRUTH),
            *(Reason.WRONG_QUESTION, Reason.UNKNOWN_TASK, Reason.HELD_OUT, Reason.UNREADABLE, Reason.FLOODING),
        ):
            assert node.ingress.refused[reason] > 0, (reason, node.ingress.refused)
        assert len(node.ingress.refused) < 25

    with Library(TASKS, 0) as library:

        async def run() -> None:
            async with RewardService(RewardConfig()) as scorer:
                await main(library, scorer)

        asyncio.run(run())
    assert not touched.exists()


async def logprobs(rows: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[-1.0] * (len(row) - 1) for row in rows]


async def drained(exchange: NatsExchange) -> None:
    while True:
        await exchange.receive(1000)


async def test_headers_that_nobody_can_parse_end_no_reader_s_connection(tmp_path: Path) -> None:
    """The stream keeps such a frame for an hour, and every connection would end at it."""
    async with (
        NatsServer(ServerOptions(tmp_path)) as server,
        NatsExchange(NatsOptions((server.url,), "reef")) as member,
    ):
        first = asyncio.create_task(member.receive(9))
        await until(lambda: member.connected)
        parts = urlsplit(server.url)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(b'CONNECT {"headers": true}\r\nHPUB shoal.reef.offer.x 8 9\r\nNATS/1.0!\r\n')
        assert await asyncio.wait_for(first, 30) == [b"!"]
        await member.publish("a", b"frame")
        assert await member.receive(9) == [b"frame"]
        assert member.connections == 1
        writer.close()
        await writer.wait_closed()


async def lying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers as a NATS server does, and to each request with a number: any member may, if it is faster."""
    writer.write(b'INFO {"server_id": "x", "version": "2.10.0", "max_payload": 99999, "headers": true}\r\n')
    inbox = b""
    while line := await reader.readline():
        kind, *words = line.split()
        if kind == b"PING":
            writer.write(b"PONG\r\n")
        elif kind == b"SUB":
            inbox = words[-1]
        elif kind == b"PUB":
            await reader.readexactly(int(words[-1]) + 2)
            writer.write(b"MSG %s %s 1\r\n5\r\n" % (words[1], inbox))
    writer.close()


async def test_answers_of_any_form_in_the_server_s_name_end_no_reading() -> None:
    async with await asyncio.start_server(lying, "127.0.0.1", 0) as server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with NatsExchange(NatsOptions((url,), "reef")) as member:
            first = asyncio.create_task(member.receive(9))
            await until(lambda: first.done() or member.failure)
            assert not first.done()
            assert "not iterable" in member.failure
            first.cancel()
            await asyncio.wait([first])


def test_tasks_that_a_function_or_a_judge_scores_are_no_peer_s(tmp_path: Path) -> None:
    data, function = tmp_path / "data.jsonl", {"name": "function", "path": "os:system"}
    rows = [{"prompt": c, "answer": c, "info": {} if c > "h" else {"scorer": "exact"}} for c in "abcdefghijklmnop"]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    config = TaskConfig.model_validate(
        {"name": "x", "service": "jsonl", "path": str(data), "scorer": function, "eval_share": 0.3}
    )
    service = JsonlService(config, 0)
    own, trained = OwnTasks([service]), {task.answer for task in service.tasks(Split.TRAIN)}
    taken = {c for c in trained if isinstance(asyncio.run(own.task(Claim("x", str(c), c))), Task)}
    assert taken == {c for c in trained if str(c) <= "h"}
    assert len(taken) < len(trained)


def test_a_receipt_of_this_test_is_what_it_says(tmp_path: Path) -> None:
    """The lies above are lies: the claims they are made from are true, of a task with a scorer of its own too."""
    with Library([TASKS[0].model_copy(update={"scorer": "exact"}), TASKS[1]], 0) as library:
        own = OwnTasks(library.services)

        async def main() -> None:
            for service in library.services:
                task = service.draw(Split.TRAIN, 3)
                claim = await own.claim(task)
                assert isinstance(claim.receipt, Receipt)
                again = await own.task(claim)
                assert isinstance(again, Task)
                assert replace(again, id=task.id) == task

        asyncio.run(main())
        own.close()
