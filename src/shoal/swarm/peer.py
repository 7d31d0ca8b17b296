"""A peer reads frames, keeps a ban list and a status, and sends messages: node, generator and human node build on it.

    listen   consumes frames of the exchange as fast as the intake allows; yields to other tasks between two frames
    follow   does the same with the frames of established authors, so a flood of strangers delays none of them
    report   reads banned.txt, does the periodic work, and writes status.json

A file that cannot be read or written ends no peer: the failure is logged once and shown in the status.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal import wire
from shoal.config import Config
from shoal.errors import ExchangeUnavailable
from shoal.interfaces import Exchange
from shoal.net.identity import Identity
from shoal.swarm.trust.ingress import IngressFilter, Recogniser, TrustLimits, VerifiedMessage
from shoal.swarm.trust.rates import Bucket
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.envelope import Signer
from shoal.swarm.wire.offer import Offer

BANNED_FILE = "banned.txt"
KNOWN_FILE = "known.txt"
"""File in a node's folder with the established peers, for its next process; people may add to it in between."""
STATUS_FILE = "status.json"
SESSION_FILE = "session"
INTAKE_PER_S = 60.0
"""Frames read per second at most, on average, from all strangers together."""
FOLLOWED_PER_S = 240.0
"""Frames under names of established authors, read per second at most: others can send under their names."""
INTAKE_BATCH = 32
"""Frames between two rests of the intake."""
FRAME_S = 0.5e-3
"""Seconds of a core that a frame may take; a slower frame counts as several. Most take 0.2 ms."""
INTAKE_BURST_S = 16.0
"""Seconds of intake that a late joiner, or a peer that was cut off, may read at once."""
OWN_COST = 0.25
"""Cost of reading an own frame, relative to another's: no signature is checked."""
SENT_SHARE = 0.9
"""Messages sent, as a fraction of the peers' rate limit per author; faster messages are dropped."""
RETRY_S = 0.5
"""Seconds between two attempts to send."""
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Joined:
    """Exchange, tasks, key, files and settings of a peer that joins a swarm."""

    exchange: Exchange
    own: Recogniser
    identity: Identity
    folder: Path
    """Folder of banned.txt, which others may add to, and of status.json."""
    config: Config
    clock: Callable[[], float] = time.time
    """Unix time."""
    timer: Callable[[], float] = time.thread_time
    """Seconds of a core that this thread has used."""
    frames_per_s: float = INTAKE_PER_S
    """Rate of reading; slow frames count as several."""


@dataclass(slots=True)
class PeerCounts:
    """Counts since the start of a peer."""

    shared: int = 0
    shared_bytes: int = 0
    unsent: int = 0
    """Own groups chosen for sharing that were too old, too many, too large, or not portable."""


@dataclass(slots=True)
class NodeCounts(PeerCounts):
    """Counts since the start of a node."""

    taken: int = 0
    missing: int = 0
    """Groups that steps wanted and did not get."""


class Peer:
    """Base class of node, generator and human node; each adds its use of the offers received. One event loop."""

    report_every_s = 5.0

    def __init__(self, joined: Joined) -> None:
        self.swarm, self.peer_id = joined.config.swarm.name, joined.identity.peer_id
        self.fresh_s = joined.config.swarm.fresh_s
        """Seconds after which an offer is neither sent nor taken."""
        self._exchange, self._own, self._folder, self._clock = joined.exchange, joined.own, joined.folder, joined.clock
        self._timer = joined.timer
        limits = TrustLimits()
        self._outgoing = Bucket(SENT_SHARE * limits.rate_per_s, SENT_SHARE * limits.burst)
        self._intake = Bucket(joined.frames_per_s, joined.frames_per_s * INTAKE_BURST_S)
        self._followed_intake = Bucket(FOLLOWED_PER_S, FOLLOWED_PER_S)
        self.ingress = IngressFilter(self.swarm, self.peer_id, timer=self._timer)
        self.tally = PeerCounts()
        self.file_failures: dict[str, str] = {}
        """Reasons of the last failures to read or write this peer's files, by file name."""
        self._read_bans()
        self._signer = Signer(joined.identity, self.swarm, next_session(self._folder, self._clock()))

    async def beside(self, **loops: Coroutine[None, None, None]) -> None:
        """Listens, reports and runs the named `loops` until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            own = {
                "listening": self._listen(self._exchange.receive, self._intake),
                "following": self._listen(self._receive_established, self._followed_intake),
                "reporting": self._report(),
            }
            for name, loop in (own | loops).items():
                tasks.create_task(loop, name=f"swarm: {name}")

    @property
    def connected(self) -> bool:
        """True while the swarm can be reached."""
        return self._exchange.connected

    def status(self) -> dict[str, object]:
        """State shown by `shoal swarm status` for every kind of peer."""
        return {
            "peer_id": self.peer_id,
            "swarm": self.swarm,
            "connected": self.connected,
            "failure": "; ".join(filter(None, (self._exchange.failure, *self.file_failures.values()))),
            "time_s": self._clock(),
            "refused": {reason.value: count for reason, count in self.ingress.refused.items()},
            "banned": sorted(self.ingress.banned),
            **asdict(self.tally),
        }

    def remember(self, name: str, text: str) -> None:
        """Writes a file of this peer for its next process."""
        with self._file(name):
            write_whole(self._folder / name, text)

    def remembered(self, name: str) -> str:
        """Reads a file of an earlier process; empty if missing."""
        path = self._folder / name
        with self._file(name):
            return path.read_text(errors="replace") if path.exists() else ""
        return ""

    def _receive(self, message: VerifiedMessage, offer: Offer) -> None:
        """Takes a verified offer. Returns at once."""

    async def _periodic(self) -> None:
        """Does the periodic work, every `report_every_s`, after the ban list was read."""

    async def _share_offer(self, offer: Offer) -> None:
        """Signs an offer and sends it, waiting for the exchange until the offer is too old; counts it.

        The signed frame is kept: peers count a second attempt as the same message. Raises `WireError` for an offer too
        large.
        """
        payload, frame, outgoing = wire.encode(offer), None, self._outgoing
        outgoing.take(asyncio.get_running_loop().time(), 0.0)
        outgoing.spend(1.0)
        await asyncio.sleep(max(0.0, outgoing.used - outgoing.burst) / outgoing.rate_per_s)
        while self._clock() < offer.made_s + self.fresh_s:
            if frame is None and self.connected:
                frame = self._signer.frame(payload, self._clock())
            with contextlib.suppress(ExchangeUnavailable):
                if frame is not None:
                    await self._exchange.publish(self.peer_id, frame)
                    self.tally.shared += 1
                    self.tally.shared_bytes += len(frame)
                    return
            await asyncio.sleep(RETRY_S)
        self.tally.unsent += 1

    async def _listen(self, receive: Callable[[int], Awaitable[list[bytes]]], intake: Bucket) -> None:
        """Reads frames; a frame costs as much of the intake as it takes of the processor."""
        while True:
            for frame in await receive(INTAKE_BATCH):
                await self._admit(frame, intake)
            intake.take(asyncio.get_running_loop().time(), 0.0)
            await asyncio.sleep(max(0.0, intake.used - intake.burst) / intake.rate_per_s)

    async def _receive_established(self, most: int) -> list[bytes]:
        return await self._exchange.receive_from(frozenset(self.ingress.established), most)

    async def _admit(self, frame: bytes, intake: Bucket) -> None:
        """Admits a frame at the cost of an intake, and passes its message on; then yields to other tasks."""
        loop_s, began_s = asyncio.get_running_loop().time(), self._timer()
        message = self.ingress.admit(frame, self._clock(), loop_s)
        intake.take(loop_s, 0.0)
        intake.spend(max(OWN_COST if message is Reason.OWN else 1.0, (self._timer() - began_s) / FRAME_S))
        if isinstance(message, VerifiedMessage):
            self._receive(message, message.content)
        await asyncio.sleep(0)

    async def _report(self) -> None:
        try:
            while True:
                self._read_bans()
                await self._periodic()
                self.remember(STATUS_FILE, json.dumps(self.status()))
                await asyncio.sleep(self.report_every_s)
        finally:
            self.remember(STATUS_FILE, json.dumps(self.status()))

    def _read_bans(self) -> None:
        with self._file(BANNED_FILE):
            self.ingress.banned.update(read_lines(self._folder / BANNED_FILE))

    @contextmanager
    def _file(self, name: str) -> Iterator[None]:
        """Records failures within the block that uses a file; logs each new failure."""
        try:
            yield
        except OSError as error:
            failure = f"{name}: {error}"
            if failure != self.file_failures.get(name):
                LOG.warning("swarm: %s", failure)
            self.file_failures[name] = failure
        else:
            self.file_failures.pop(name, None)


def ban_in(folder: Path, peer_ids: Sequence[str]) -> None:
    """Adds peers to the ban list in a peer's folder; a running peer reads it within seconds. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / BANNED_FILE
    before = path.read_bytes() if path.exists() else b""
    with path.open("a") as file:
        if before and not before.endswith(b"\n"):
            file.write("\n")  # people edit it too
        file.writelines(f"{peer_id}\n" for peer_id in peer_ids)


def read_lines(path: Path) -> list[str]:
    """Reads the words of a file that people edit, in any encoding; a missing file has none. Raises `OSError`."""
    try:
        return path.read_text(errors="replace").split()
    except FileNotFoundError:
        return []


def write_whole(path: Path, text: str) -> None:
    """Replaces a file, whole or not at all. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def next_session(folder: Path, now_s: float) -> int:
    """Returns a number above those of all earlier processes in this folder, even if the clock went back."""
    path, session = folder / SESSION_FILE, int(now_s * 1000)
    with contextlib.suppress(OSError, ValueError):  # without the file it is the time alone
        session = max(session, int(path.read_text()) + 1)
    with contextlib.suppress(OSError):
        write_whole(path, str(session))
    return session
