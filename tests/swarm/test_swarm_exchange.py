"""Frames between members: in memory, and through real nats-server processes that are killed and restarted."""

import asyncio
import contextlib
import datetime
import ipaddress
import itertools
import json
import os
import re
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamInfo, StreamState

from benchmarks.memory_swarm import MemorySwarm
from shoal.errors import ChildDied, ConfigError, ExchangeUnavailable
from shoal.interfaces import Exchange
from shoal.net.listening import free_port
from shoal.rehearsal.clock import run_virtual
from shoal.swarm.wire.invitation import NatsOptions
from shoal.swarm.wire.nats import KEPT_PER_AUTHOR, MOST_BEHIND, NatsExchange
from shoal.swarm.wire.server import MOST_STORED_BYTES, NatsServer, ServerOptions, server_config
from until import until


async def collected(exchange: Exchange, count: int, timeout_s: float = 60.0) -> list[bytes]:
    """The next `count` frames."""
    frames: list[bytes] = []
    async with asyncio.timeout(timeout_s):
        while len(frames) < count:
            frames += await exchange.receive(count - len(frames))
    return frames


async def published(exchange: Exchange, *frames: bytes, author: str = "a", timeout_s: float = 60.0) -> None:
    """Publishes, trying again while nobody can be reached."""
    async with asyncio.timeout(timeout_s):
        for frame in frames:
            while True:
                try:
                    await exchange.publish(author, frame)
                    break
                except ExchangeUnavailable:
                    await asyncio.sleep(0.05)


def with_server(
    folder: Path, body: Callable[[NatsServer, Callable[[str], NatsExchange]], Awaitable[None]], **options: object
) -> None:
    """Runs a test against one server; exchanges that it makes are read from all the time, as a node does."""

    async def main() -> None:
        open_: list[NatsExchange] = []

        def joined(url: str) -> NatsExchange:
            open_.append(NatsExchange(NatsOptions((url,), "reef")))
            return open_[-1]

        async with NatsServer(ServerOptions(folder, **options)) as server:
            try:
                await body(server, joined)
            finally:
                for exchange in open_:
                    await exchange.__aexit__(None, None, None)

    asyncio.run(main())


async def memory_members() -> None:
    hub = MemorySwarm()
    first = hub.join()
    for i in range(KEPT_PER_AUTHOR + 2):
        await first.publish("flood", b"%d" % i)
    await first.publish("quiet", b"q")
    late = hub.join()
    assert await late.receive(2) == [b"2", b"3"]
    assert (await late.receive(KEPT_PER_AUTHOR))[-2:] == [b"%d" % (KEPT_PER_AUTHOR + 1), b"q"]
    waiting = asyncio.ensure_future(late.receive(9))
    await asyncio.sleep(1)
    assert not waiting.done()
    late.here.clear()
    await first.publish("flood", b"w")
    await asyncio.sleep(1)
    assert not waiting.done()
    with pytest.raises(ExchangeUnavailable):
        await late.publish("b", b"x")
    late.here.set()
    assert await waiting == [b"w"]


def test_in_memory_a_late_joiner_reads_what_is_kept_and_a_member_that_was_away_reads_on() -> None:
    run_virtual(memory_members())


def test_a_late_joiner_reads_the_history_in_order_and_a_flood_pushes_out_only_its_own(tmp_path: Path) -> None:
    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        first = joined(server.url)
        reading = asyncio.ensure_future(collected(first, KEPT_PER_AUTHOR + 51))
        await published(first, b"quiet", author="quiet")
        await published(first, *(b"%d" % i for i in range(KEPT_PER_AUTHOR + 50)), author="flood")
        await reading
        late = await collected(joined(server.url), KEPT_PER_AUTHOR + 1)
        assert late == [b"quiet", *(b"%d" % i for i in range(50, KEPT_PER_AUTHOR + 50))]

    with_server(tmp_path, body)


def test_frames_of_followed_authors_are_read_past_all_others_and_none_is_lost(tmp_path: Path) -> None:
    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        sender, reader = joined(server.url), joined(server.url)
        sending = asyncio.ensure_future(collected(sender, 10**9))

        async def read_from(names: str, *expected: bytes) -> None:
            followed: list[bytes] = []
            async with asyncio.timeout(60):
                while len(followed) < len(expected):
                    followed += await reader.receive_from(frozenset([*names, "no name", "*", ">", ""]), 9)
            assert followed == list(expected)

        await published(sender, b"a 0", b"a 1", author="a")
        assert await collected(reader, 2) == [b"a 0", b"a 1"]
        assert await reader.receive_from(frozenset("a"), 9) == [], "it begins where the first reader is"
        strangers = [b"x %d" % i for i in range(60)]
        await published(sender, *strangers, author="x")
        await published(sender, b"a 2", author="a")
        await read_from("a", b"a 2")
        await published(sender, b"b 0", author="b")
        await read_from("ab", b"a 2", b"b 0")  # again from the first reader's place: b's frames may lie there
        await published(sender, b"end", author="x")
        assert await collected(reader, 61) == [*strangers, b"end"]
        sending.cancel()

    with_server(tmp_path, body)


def test_the_only_followed_author_is_read_with_all_others_again_once_it_is_followed_no_more(tmp_path: Path) -> None:
    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        reader = joined(server.url)
        await published_and_read(reader, b"a 0")
        assert await reader.receive_from(frozenset("a"), 9) == []
        assert await reader.receive_from(frozenset(), 9) == []
        await published_and_read(reader, b"a 1")

    async def published_and_read(exchange: NatsExchange, frame: bytes) -> None:
        reading = asyncio.ensure_future(collected(exchange, 1, 20))
        await published(exchange, frame, author="a")
        assert await reading == [frame]

    with_server(tmp_path, body)


def test_followed_authors_are_read_on_after_a_restart_of_the_server(tmp_path: Path) -> None:
    async def main() -> None:
        options = ServerOptions(tmp_path, port=free_port())
        reader = NatsExchange(NatsOptions((f"nats://127.0.0.1:{options.port}",), "reef"))
        reading = asyncio.ensure_future(collected(reader, 10**9, 3600))
        numbers = itertools.count()
        for _ in range(2):
            async with NatsServer(options):
                first, frames = next(numbers), list[bytes]()
                async with asyncio.timeout(60):
                    while not frames:  # the first reader has those from before the author is followed
                        await published(reader, b"%d" % next(numbers), author="a")
                        frames = await reader.receive_from(frozenset("a"), 9)
                assert all(int(frame) > first for frame in frames)
        reading.cancel()
        await reader.__aexit__(None, None, None)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("made", "connects", "sentence"),
    [
        ({"subjects": ["other.>"]}, False, r"keeps other\.> and none of shoal\.reef\.\*\.\*: remove it"),
        ({"subjects": ["shoal.reef.offer.x"]}, False, "and none of"),
        (
            {"subjects": ["shoal.reef.>"]},
            True,
            "no bound on its bytes, no bound on the age .*, no bound on the frames of",
        ),
        (
            {"subjects": ["shoal.*.*.*"], "max_bytes": 1 << 20, "max_age": 60.0, "max_msgs_per_subject": 9},
            True,
            "^$",
        ),
    ],
)
def test_a_stream_that_somebody_else_made_is_used_if_it_keeps_the_swarm_and_what_it_lacks_is_said(
    tmp_path: Path, made: dict[str, object], connects: bool, sentence: str
) -> None:
    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        client = await nats.connect(server.url)
        await client.jetstream().add_stream(name="shoal-reef", **made)
        await client.publish("shoal.atoll.offer.a", b"of another swarm")
        await client.close()
        member = joined(server.url)
        reading = asyncio.ensure_future(collected(member, 1))
        if connects:
            await published(member, b"1")
            assert await reading == [b"1"]
        else:
            await until(lambda: bool(member.failure))
            reading.cancel()
        assert member.connected == connects
        assert re.search(sentence, member.failure), member.failure

    with_server(tmp_path, body)


def files_below(folder: Path, name: str = "streams") -> list[Path]:
    return [path for found in folder.rglob(name) for path in found.rglob("*") if path.is_file()]


def test_a_reader_that_is_busy_for_a_minute_keeps_its_place_at_the_server(tmp_path: Path) -> None:
    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        member = joined(server.url)
        reading = asyncio.ensure_future(collected(member, 1))
        await published(member, b"1")
        await reading
        client = await nats.connect(server.url)
        (consumer,) = await client.jetstream().consumers_info("shoal-reef")
        assert consumer.config.inactive_threshold == 60.0
        assert {path.name for path in await asyncio.to_thread(files_below, tmp_path)} >= {"meta.inf"}
        assert not await asyncio.to_thread(files_below, tmp_path, "obs"), "the place is in memory, and writes no file"
        await client.close()

    with_server(tmp_path, body)


def test_a_reader_whose_place_the_server_has_lost_reads_on(tmp_path: Path) -> None:
    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        member = joined(server.url)
        reading = asyncio.ensure_future(collected(member, 2))
        await published(member, b"1")
        client = await nats.connect(server.url)
        for consumer in await client.jetstream().consumers_info("shoal-reef"):
            await client.jetstream().delete_consumer("shoal-reef", consumer.name)
        await published(member, b"2")
        await client.close()
        assert await reading == [b"1", b"2"]

    with_server(tmp_path, body)


def test_what_anybody_stores_on_a_server_is_bounded(tmp_path: Path) -> None:
    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        client = await nats.connect(server.url)
        with pytest.raises(nats.js.errors.APIError, match="insufficient storage"):
            await client.jetstream().add_stream(name="all", subjects=["all.>"], max_bytes=MOST_STORED_BYTES + 1)
        await client.close()

    with_server(tmp_path, body)


def test_who_is_far_behind_skips_to_the_newest_frames(tmp_path: Path) -> None:
    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        first = joined(server.url)
        hearing = asyncio.ensure_future(collected(first, 1))
        await published(first, b"0", author="a0")
        await hearing
        client = await nats.connect(server.url)
        for i in range(1, 2 * MOST_BEHIND):
            await client.publish(f"shoal.reef.offer.a{i % 100}", b"%d" % i)

        async def stored() -> bool:
            return (await client.jetstream().stream_info("shoal-reef")).state.last_seq >= 2 * MOST_BEHIND

        await until(stored)
        await client.close()
        frames: list[bytes] = []
        while not frames or frames[-1] != b"%d" % (2 * MOST_BEHIND - 1):
            frames += await first.receive(32)
        newest = [b"%d" % i for i in range(2 * MOST_BEHIND - MOST_BEHIND // 2 - 1, 2 * MOST_BEHIND)]
        assert frames[-len(newest) :] == newest
        before = frames[: -len(newest)]
        assert before == [b"%d" % i for i in range(1, len(before) + 1)]
        assert len(before) <= 64, "what was fetched before the others were published, and one more batch"

    with_server(tmp_path, body)


@pytest.mark.parametrize("keeps_its_streams", [True, False])
async def test_when_the_server_is_killed_members_wait_and_go_on_with_the_next_one(
    tmp_path: Path, keeps_its_streams: bool
) -> None:
    port = free_port()

    folders = [tmp_path / "a", tmp_path / ("a" if keeps_its_streams else "b")]
    url = f"nats://127.0.0.1:{port}"
    async with NatsExchange(NatsOptions((url,), "reef")) as one, NatsExchange(NatsOptions((url,), "reef")) as two:
        frames: list[bytes] = []

        async def read() -> None:
            while True:
                frames.extend(await two.receive(10))

        async def heard(*expected: bytes) -> None:
            await until(lambda: frames == list(expected))

        reading = [asyncio.ensure_future(read()), asyncio.ensure_future(collected(one, 99, 1000))]
        async with NatsServer(ServerOptions(folders[0], port=port)) as server:
            await published(one, b"1", b"2")
            await heard(b"1", b"2")
            os.kill(server.pid, signal.SIGKILL)
            assert "signal 9" in str(await server.died())
            await until(lambda: not (one.connected or two.connected))
            with pytest.raises(ExchangeUnavailable):
                await one.publish("a", b"lost")
        async with NatsServer(ServerOptions(folders[1], port=port)):
            await published(one, b"3")
            await heard(b"1", b"2", b"3")
            assert two.connections == 2
        for task in reading:
            task.cancel()


def test_a_task_that_is_cancelled_just_as_the_server_s_reply_comes_ends(tmp_path: Path) -> None:
    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        one = joined(server.url)
        first = asyncio.ensure_future(collected(one, 1))
        await published(one, b"0")
        await first
        assert one._client is not None
        replies = one._client._resp_map

        async def publish() -> None:
            while True:
                await one.publish("a", b"1")

        publishing = asyncio.ensure_future(publish())
        await until(lambda: replies)
        next(iter(replies.values())).add_done_callback(lambda _: publishing.cancel())
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(60):
                await publishing

    with_server(tmp_path, body)


def test_a_node_leaves_a_server_that_stands_still_although_it_takes_no_more_bytes(tmp_path: Path) -> None:
    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        one = joined(server.url)
        first = asyncio.ensure_future(collected(one, 1))
        await published(one, b"0")
        await first
        os.kill(server.pid, signal.SIGSTOP)
        try:
            full = bytes(500_000)  # together more than the sockets hold
            sending = [asyncio.ensure_future(one.publish(f"{i}", full)) for i in range(40)]
            await until(lambda: one._client is not None and one._client._pending_data_size > 0)
            async with asyncio.timeout(60):
                await one.__aexit__(None, None, None)
                outcomes = await asyncio.gather(*sending, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {ExchangeUnavailable}
        finally:
            os.kill(server.pid, signal.SIGCONT)

    with_server(tmp_path, body)


def test_any_of_several_servers_will_do(tmp_path: Path) -> None:
    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        dead = [f"nats://127.0.0.1:{free_port()}" for _ in range(2)]
        options = NatsOptions((*dead, server.url), "reef")
        async with NatsExchange(options) as one:
            reading = asyncio.ensure_future(collected(one, 1))
            await published(one, b"1")
            assert await reading == [b"1"]

    with_server(tmp_path, body)


def test_a_server_with_a_token_lets_in_only_who_knows_it(tmp_path: Path) -> None:
    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        knowing = joined(server.url.replace("nats://", "nats://secret@"))
        reading = asyncio.ensure_future(collected(knowing, 1))
        await published(knowing, b"1")
        assert await reading == [b"1"]
        stranger = joined(server.url)
        hearing = asyncio.ensure_future(stranger.receive(1))
        await until(lambda: "Authorization" in stranger.failure)
        hearing.cancel()
        assert not stranger.connected

    with_server(tmp_path, body, token="secret")


def test_servers_with_a_token_are_a_cluster_of_those_who_know_it(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    routes = tuple(f"nats://127.0.0.1:{port}" for port in ports)

    async def main() -> None:
        options = [
            ServerOptions(tmp_path / str(i), name=f"s{i}", cluster_port=port, routes=routes, token="a/b@c")
            for i, port in enumerate(ports)
        ]
        async with NatsServer(options[0]) as one, NatsServer(options[1]):
            assert (tmp_path / "0" / "server.conf").stat().st_mode & 0o777 == 0o600
            reader, writer = await asyncio.open_connection("127.0.0.1", ports[0])
            assert b'"auth_required":true' in await reader.readline()
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", int(one.url.rpartition(":")[2]))
            writer.write(b'CONNECT {"auth_token": "a/b@c", "protocol": 1, "verbose": false}\r\nPING\r\n')
            async with asyncio.timeout(60):
                while True:
                    line = await reader.readline()
                    if line.startswith(b"INFO") and len(json.loads(line[5:]).get("connect_urls", [])) == 2:
                        break
            writer.close()

    asyncio.run(main())


def test_three_servers_of_a_cluster_each_keep_the_frames(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    routes = tuple(f"nats://127.0.0.1:{port}" for port in ports)

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            options = [
                ServerOptions(tmp_path / str(i), name=f"s{i}", cluster_port=port, routes=routes)
                for i, port in enumerate(ports)
            ]
            servers = [await stack.enter_async_context(NatsServer(one)) for one in options]
            client = await nats.connect(servers[0].url)
            async with asyncio.timeout(60):
                formed = False
                while not formed:
                    with contextlib.suppress(nats.errors.Error):
                        await client.jetstream().add_stream(name="formed", subjects=["formed"], num_replicas=3)
                        formed = True
            member = NatsExchange(NatsOptions(tuple(server.url for server in servers), "reef"))
            reading = asyncio.ensure_future(collected(member, 1))
            await published(member, b"1")
            assert await reading == [b"1"]
            assert (await client.jetstream().stream_info("shoal-reef")).config.num_replicas == 3
            await client.close()
            await member.__aexit__(None, None, None)

    asyncio.run(main())


class Refusing(JetStreamContext):
    """A server without streams that refuses copies with a code of its errors."""

    def __init__(self, code: int) -> None:
        super().__init__(Client())
        self.code, self.asked = code, list[int]()

    async def stream_info(self, *_: object, **__: object) -> StreamInfo:
        raise nats.js.errors.NotFoundError

    async def add_stream(self, config: StreamConfig | None = None, **params: int) -> StreamInfo:  # type: ignore[override]
        self.asked.append(params["num_replicas"])
        if params["num_replicas"] > 1:
            nats.js.errors.APIError.from_error({"code": 500, "err_code": self.code, "description": "why"})
        return StreamInfo(config or StreamConfig(), StreamState(0, 0, 0, 0, 0))


@pytest.mark.parametrize("code", [10008, 10027, 10047, 10120])
async def test_a_stream_that_is_refused_for_another_reason_than_its_copies_is_not_made_with_one(code: int) -> None:
    stream = Refusing(code)
    with pytest.raises(nats.js.errors.ServerError, match=f"ServerError: code=500 err_code={code} description='why'"):
        await NatsExchange(NatsOptions(("nats://127.0.0.1:1",) * 3, "reef"))._ensure_stream(stream)
    assert stream.asked == [3]


@pytest.mark.parametrize("code", [10005, 10074])
async def test_servers_that_cannot_have_copies_keep_one(code: int) -> None:
    stream = Refusing(code)
    await NatsExchange(NatsOptions(("nats://127.0.0.1:1",) * 3, "reef"))._ensure_stream(stream)
    assert stream.asked == [3, 1]


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "reef")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(made.public_bytes(Encoding.PEM))
    key_path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return cert_path, key_path


def test_tls_is_used_when_asked_for_and_an_unknown_certificate_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)

    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        url = server.url.replace("nats://", "tls://")
        doubting = joined(url)
        hearing = asyncio.ensure_future(doubting.receive(1))
        await until(lambda: "CERTIFICATE_VERIFY_FAILED" in doubting.failure)
        hearing.cancel()
        assert not doubting.connected
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        trusting = joined(url)
        reading = asyncio.ensure_future(collected(trusting, 1))
        await published(trusting, b"1")
        assert await reading == [b"1"]

    with_server(tmp_path / "server", body, tls_cert=cert, tls_key=key)


def test_a_server_without_tls_is_told_nothing_where_the_url_asks_for_tls(tmp_path: Path) -> None:
    async def body(server: NatsServer, joined: Callable[[str], NatsExchange]) -> None:
        member = joined(server.url.replace("nats://", "tls://"))
        reading = asyncio.ensure_future(collected(member, 1))
        await until(lambda: member.connected or bool(member.failure))
        reading.cancel()
        assert (member.connected, member.failure) == (False, "the server offers no TLS")

    with_server(tmp_path, body)


@pytest.mark.parametrize(
    ("servers", "swarm", "sentence"),
    [
        ((), "reef", "expected at least one URL"),
        (("localhost:4222",), "reef", "expected nats://HOST:PORT"),
        (("nats://h",), "a.b", "expected letters"),
        (("nats://h",), "*", "expected letters"),
    ],
)
def test_wrong_options_are_a_sentence(servers: tuple[str, ...], swarm: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        NatsOptions(servers, swarm)


def test_a_server_that_cannot_start_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both a TLS certificate and its key"):
        server_config(ServerOptions(tmp_path, tls_cert=tmp_path))
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 can be reached by others; give a token"):
        server_config(ServerOptions(tmp_path, host="0.0.0.0"))

    async def started(options: ServerOptions) -> None:
        async with NatsServer(options):
            pass

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="port: expected a free one"):
        asyncio.run(started(ServerOptions(tmp_path, port=taken.getsockname()[1])))
    no_certificate = tmp_path / "empty.pem"
    no_certificate.touch()
    with pytest.raises(ChildDied, match=r"see .*(server|start)\.log"):
        asyncio.run(started(ServerOptions(tmp_path, tls_cert=no_certificate, tls_key=no_certificate)))
