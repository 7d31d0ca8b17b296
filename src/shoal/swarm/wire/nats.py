"""A NATS exchange sends frames through JetStream, which keeps frames for late joiners.

A swarm has one stream, with one subject per author. The server keeps only the last frames of a subject, so a
flooding author pushes out only its own. Frames are pulled: a reader gets no more than it asks for. Any peer makes a
missing stream. A second consumer reads the subjects of known authors, so no stranger's frames are ahead of theirs.

An exchange has one connection and one repair. After any failure it closes the connection, and `receive` connects to the
first server that answers, for as long as it takes. Reading continues after the last frame by the server's clock, even
if another server began a new stream.
"""

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, DiscardPolicy, StorageType, StreamConfig
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError

from shoal.errors import ExchangeUnavailable
from shoal.swarm.wire.envelope import MAX_FRAME_BYTES
from shoal.swarm.wire.invitation import NatsOptions

MOST_BEHIND = 1024
"""Most unread frames of an exchange. One further behind skips to the newest half: old offers are worth little,
and a large swarm sends more than a node can read."""
KEPT_PER_AUTHOR = 128
"""Frames of one author; a flooding author pushes out only its own."""
CONNECT_TIMEOUT_S = 2
PUBLISH_TIMEOUT_S = 5.0
FETCH_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 2.0
"""Seconds for the last bytes of a connection; then it is cut. A hung server would never take them."""
PING_INTERVAL_S = 5
"""Seconds between pings. Two unanswered pings end the connection, because a cut cable reports nothing."""
RETRY_S = (0.25, 4.0)
"""Seconds of the first and of the longest pause between two attempts to connect."""
CONSUMER_IDLE_S = 60.0
HISTORY_S = 3600.0
"""Seconds that the stream keeps frames, and that a late joiner reads back."""
SKIP_EVERY_S = 10.0
"""Seconds between two skips to the newest frames. In a flood every peer is behind again at once, and each skip makes a
consumer."""
NO_COPIES = (10005, 10074)
"""Errors of servers that cannot keep copies: too few of them are there, or they form no cluster."""
STREAM_BYTES = 256 * 1024 * 1024
MOST_FOLLOWED = 1024
"""Subjects of the second consumer's filter."""


@contextmanager
def _ends_when_cancelled() -> Iterator[None]:
    """Raises `CancelledError` after calls of nats-py in a cancelled task.

    nats-py swallows a cancellation in some of its waits, and so does Python 3.11 in `wait_for` when the awaited reply
    came just before. The task would never end, and its canceller would wait for it.
    """
    try:
        yield
    finally:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError


class _FrameClient(Client):
    """Client that reads no headers of stored frames: nats-py takes an author's for the server's own words.

    A header that it cannot parse would end every reader's connection, again and again while the stream keeps the frame.
    """

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        await super()._process_msg(sid, subject, reply, data, b"" if reply.startswith(b"$JS.ACK.") else headers)


class _TlsClient(_FrameClient):
    """Client that disconnects from a server without TLS before it sends anything, such as its token.

    nats-py would continue in plain text, even for a tls:// URL.
    """

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if not info.get("tls_required"):
            raise nats.errors.Error("the server offers no TLS")
        await super()._process_info(info, initial_connection)


@dataclass(slots=True)
class _Position:
    """The last message that a consumer has read, by the server's clock and by its number in the stream."""

    time: datetime
    number: int = 0

    def advance(self, message: Msg) -> bool:
        """Moves on to a message; returns False for a repeat of the last."""
        metadata = message.metadata
        assert metadata.timestamp is not None
        at, number = metadata.timestamp, metadata.sequence.stream
        if number <= self.number and at <= self.time:
            return False
        self.time, self.number = at, number
        return True


class NatsExchange:
    """One peer's connection; implements `interfaces.Exchange`. Use as an async context manager.

    Entering connects to nothing: `receive` connects, so some task must always await it.
    """

    def __init__(self, options: NatsOptions) -> None:
        self._options = options
        self._stream = f"shoal-{options.swarm}"
        self._subjects = f"shoal.{options.swarm}"
        self._client: Client | None = None
        self._consumer: JetStreamContext.PullSubscription | None = None
        self._read = _Position(datetime.now(UTC) - timedelta(seconds=HISTORY_S))
        self._follower: JetStreamContext.PullSubscription | None = None
        self._followed = frozenset[str]()
        """Subjects that the second consumer reads and the first one skips."""
        self._followed_read = self._read
        self._next_skip_s = 0.0
        self.connections = 0
        """Connections made so far; the lost connections are one fewer while connected."""
        self._failure = self._follow_failure = ""

    @property
    def failure(self) -> str:
        """Reason why the last attempt to connect failed, or faults of the connected stream and its second consumer."""
        return "; ".join(filter(None, (self._failure, self._follow_failure)))

    async def __aenter__(self) -> "NatsExchange":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._disconnect()

    @property
    def connected(self) -> bool:
        """True while a server and its stream can be reached."""
        return self._client is not None and self._client.is_connected and self._consumer is not None

    async def publish(self, author: str, frame: bytes) -> None:
        """Sends a frame; the stream has stored it on return. Raises `ExchangeUnavailable`."""
        client = self._client
        if client is None or not self.connected:
            raise ExchangeUnavailable("no server of the swarm is connected")
        once = {"Nats-Msg-Id": hashlib.blake2b(frame, digest_size=16).hexdigest()}
        try:
            with _ends_when_cancelled():
                kept = await client.jetstream().publish(
                    f"{self._subjects}.offer.{author}", frame, timeout=PUBLISH_TIMEOUT_S, headers=once
                )
        except Exception as error:
            raise ExchangeUnavailable(f"the swarm's server did not take a frame: {error or type(error)}") from error
        if kept.stream != self._stream:
            raise ExchangeUnavailable(f"the swarm's server put a frame into the stream {kept.stream!r}")

    async def receive(self, most: int) -> list[bytes]:
        """Waits for frames and returns up to `most`, oldest first; reconnects for as long as it takes."""
        pause_s = RETRY_S[0]
        while True:
            try:
                with _ends_when_cancelled():
                    frames = await self._fetched(most)
                pause_s = RETRY_S[0]
            except Exception as error:  # nats-py raises what it will for what comes in the server's name
                frames = []
                self._failure = str(error) or type(error).__name__
                await self._disconnect()
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # not all members at once
                pause_s = min(2 * pause_s, RETRY_S[1])
            if frames:
                return frames

    async def receive_from(self, authors: frozenset[str], most: int) -> list[bytes]:
        """Waits up to `FETCH_TIMEOUT_S` for frames under the names of `authors`; returns up to `most`."""
        names = sorted(author for author in authors if author.isalnum())[:MOST_FOLLOWED]
        try:
            if names and self.connected:
                with _ends_when_cancelled():
                    return await self._fetched_from({f"{self._subjects}.offer.{name}" for name in names}, most)
        except Exception as error:  # as in `receive`, which repairs the connection, and reads these frames until then
            names = []
            reason = str(error) or type(error).__name__
            self._follow_failure = f"known peers' frames wait among all others': {reason}" if self.connected else ""
        if not names:
            self._follower, self._followed = None, frozenset()  # `receive` reads the last one again
        await asyncio.sleep(FETCH_TIMEOUT_S)
        return []

    async def _fetched_from(self, subjects: set[str], most: int) -> list[bytes]:
        """Fetches the next frames of some subjects that arrive within a moment."""
        client = self._client
        assert client is not None
        if self._follower is None or subjects != self._followed:
            read = replace(min(self._read, self._followed_read, key=lambda read: read.time))
            if self._follower is not None:
                await self._follower.unsubscribe()
            follower = await self._follow(client.jetstream(), read, sorted(subjects))
            if client is not self._client:
                return []
            self._follower, self._followed, self._followed_read = follower, frozenset(subjects), read
            self._follow_failure = ""
        messages = await _next_of(self._follower, most)
        return [message.data for message in messages if self._followed_read.advance(message)]

    async def _fetched(self, most: int) -> list[bytes]:
        """Fetches the next frames that arrive within a moment."""
        if self._client is None or not self._client.is_connected or self._consumer is None:
            await self._disconnect()
            self._client = await self._connect()
            await self._ensure_stream(self._client.jetstream())
            self._consumer = await self._follow(self._client.jetstream(), self._read)
            self.connections += 1
        messages = await _next_of(self._consumer, most)
        new = [message for message in messages if self._read.advance(message)]
        behind = messages[-1].metadata.num_pending if messages else 0
        if behind > MOST_BEHIND and time.monotonic() >= self._next_skip_s:
            self._next_skip_s = time.monotonic() + SKIP_EVERY_S
            await self._consumer.unsubscribe()
            stream = self._client.jetstream()
            end = (await stream.stream_info(self._stream)).state.last_seq  # numbers have gaps where frames were dropped
            skip_to = max(end - MOST_BEHIND // 2, self._read.number + 1)
            self._consumer = await self._follow(stream, self._read, skip_to=skip_to)
        return [message.data for message in new if message.subject not in self._followed]

    async def _connect(self) -> Client:
        """Connects to any server. Raises the last server's failure."""
        options = self._options
        failure: Exception = OSError("no server")
        for url in random.sample(options.servers, len(options.servers)):
            client = _TlsClient() if url.startswith("tls://") else _FrameClient()
            try:
                async with asyncio.timeout(2 * CONNECT_TIMEOUT_S):
                    await client.connect(
                        url,
                        error_cb=_silence,
                        allow_reconnect=False,
                        max_reconnect_attempts=1,  # else nats-py tries a server that is away for two minutes
                        reconnect_time_wait=0,
                        connect_timeout=CONNECT_TIMEOUT_S,
                        ping_interval=PING_INTERVAL_S,
                        max_outstanding_pings=2,
                        flush_timeout=PUBLISH_TIMEOUT_S,  # else nats-py waits for room without a bound
                        user_credentials=_where(options.credentials, jwt=True),
                        nkeys_seed=_where(options.credentials, jwt=False),
                    )
                return client
            except Exception as error:
                failure = error
                await _close(client)
        raise failure

    async def _follow(
        self, stream: JetStreamContext, read: _Position, subjects: Sequence[str] = (), skip_to: int | None = None
    ) -> JetStreamContext.PullSubscription:
        """Makes a consumer of the frames after `read`, or from a number of the stream on; of some subjects, or all."""
        config = ConsumerConfig(
            filter_subjects=list(subjects) or None,
            deliver_policy=DeliverPolicy.BY_START_TIME if skip_to is None else DeliverPolicy.BY_START_SEQUENCE,
            opt_start_time=read.time if skip_to is None else None,
            opt_start_seq=skip_to,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=CONSUMER_IDLE_S,
            mem_storage=True,
            num_replicas=1,
        )
        return await stream.pull_subscribe(f"{self._subjects}.>", stream=self._stream, config=config)

    async def _ensure_stream(self, stream: JetStreamContext) -> None:
        """Makes a missing stream, on up to three servers; an operator may have made another.

        On a server without accounts, the first comer can make the stream too. A stream that keeps none of the swarm's
        frames is refused with an `ExchangeUnavailable`. A stream without bounds is used, and `failure` says so.
        """
        with contextlib.suppress(NotFoundError):
            found = (await stream.stream_info(self._stream)).config
            if not any(_covers(pattern, f"{self._subjects}.*.*") for pattern in found.subjects or ()):
                raise ExchangeUnavailable(
                    f"the stream {self._stream} keeps {', '.join(found.subjects or ()) or 'nothing'} and none of "
                    f"{self._subjects}.*.*: remove it from the server, or take another swarm.name"
                )
            self._failure = _complaint(found)
            return
        self._failure = ""
        config = StreamConfig(
            name=self._stream,
            subjects=[f"{self._subjects}.*.*"],
            storage=StorageType.FILE,
            discard=DiscardPolicy.OLD,
            max_age=HISTORY_S,
            max_msgs_per_subject=KEPT_PER_AUTHOR,
            max_bytes=STREAM_BYTES,
            max_msg_size=MAX_FRAME_BYTES + 1024,  # with the headers
            duplicate_window=120.0,
        )
        copies = 3 if len(self._options.servers) >= 3 else 1
        try:
            await stream.add_stream(config, num_replicas=copies)
        except nats.js.errors.APIError as error:
            if copies == 1 or error.err_code not in NO_COPIES:
                raise
            await stream.add_stream(config, num_replicas=1)

    async def _disconnect(self) -> None:
        client, self._client, self._consumer, self._follower = self._client, None, None, None
        if client is not None:
            await _close(client)


async def _next_of(consumer: JetStreamContext.PullSubscription, most: int) -> list[Msg]:
    """The next messages that arrive within a moment. Raises `NotFoundError` when the server has lost the consumer."""
    try:
        return await consumer.fetch(most, timeout=FETCH_TIMEOUT_S)
    except TimeoutError:
        await consumer.consumer_info()  # such a server is silent
        return []


async def _close(client: Client) -> None:
    """Closes a connection, and cuts it after `CLOSE_TIMEOUT_S`.

    nats-py waits without a bound until the server has taken the last bytes, and a cancellation ends no such wait.
    """

    async def close() -> None:
        with contextlib.suppress(Exception):
            await client.close()

    closing = asyncio.ensure_future(close())
    try:
        await asyncio.wait([closing], timeout=CLOSE_TIMEOUT_S)
    finally:
        if not closing.done():
            _cut(client)
    await asyncio.wait([closing], timeout=CLOSE_TIMEOUT_S)


def _cut(client: Client) -> None:
    """Ends a connection at once; unsent bytes are lost, and waits for them return."""
    writer = getattr(client._transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()


def _covers(pattern: str, subjects: str) -> bool:
    """Tells whether a NATS subject covers all subjects of another."""
    have, want = pattern.split("."), subjects.split(".")
    if have[-1] == ">":
        have, want = have[:-1], want[: len(have) - 1]
    return len(have) == len(want) and all(one in ("*", other) for one, other in zip(have, want, strict=True))


def _complaint(config: StreamConfig) -> str:
    """Names the bounds that a stream lacks; empty for a stream made here."""
    lacks = {
        "no bound on its bytes": (config.max_bytes or 0) <= 0,
        "no bound on the age of frames": not config.max_age,
        "no bound on the frames of one author, who can push out all others'": (config.max_msgs_per_subject or 0) <= 0,
        f"no room for frames above {config.max_msg_size} bytes": 0 < (config.max_msg_size or 0) < MAX_FRAME_BYTES,
        "no room for new frames once it is full": config.discard is DiscardPolicy.NEW,
    }
    found = ", ".join(what for what, is_so in lacks.items() if is_so)
    return f"the stream {config.name} has {found}" if found else ""


async def _silence(error: Exception) -> None:
    """Drops nats-py's own logging: errors are raised where they are decided."""


def _where(credentials: Path | None, *, jwt: bool) -> str | None:
    """Path of credentials of one kind: a .creds file with a JWT, or a bare nkey seed."""
    if credentials is None or ("BEGIN NATS USER JWT" in credentials.read_text()) != jwt:
        return None
    return str(credentials)
