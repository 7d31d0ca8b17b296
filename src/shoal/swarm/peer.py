"""A peer reads frames, keeps a ban list and a status, and signs its messages: node, generator and human UI build on it.

    listen   consumes frames of the exchange, one after the other; yields to other tasks between two frames
    report   reads banned.txt, does the periodic work, and writes status.json

A file that cannot be read or written ends no peer: the failure is logged once and shown in the status.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.interfaces import Exchange
from shoal.swarm.envelope import Signer
from shoal.swarm.identity import Identity
from shoal.swarm.node_files import BANNED_FILE, STATUS_FILE, Intake, next_session, read_lines, write_whole
from shoal.swarm.trust import IngressFilter, VerifiedMessage

INTAKE_BATCH = 32
LOG = logging.getLogger(__name__)


class Peer:
    """Base class of node, generator and human UI; each adds its use of the messages received. One event loop."""

    report_every_s = 5.0

    def __init__(
        self,
        exchange: Exchange,
        swarm: str,
        identity: Identity,
        folder: Path,
        *,
        clock: Callable[[], float] = time.time,
        intake: Intake | None = None,
    ) -> None:
        """`folder` holds banned.txt, which others may add to, and status.json; `clock` gives Unix time."""
        self.swarm = swarm
        self._exchange, self._identity, self._folder, self._clock = exchange, identity, folder, clock
        self._intake = intake or Intake()
        self.ingress = IngressFilter(swarm, identity.peer_id, timer=self._intake.timer)
        self.file_failures: dict[str, str] = {}
        """Reasons of the last failures to read or write this peer's files, by file name."""
        self._read_bans()
        self._session = next_session(folder, clock())
        self._signer = Signer(identity, swarm, session=self._session)

    @property
    def peer_id(self) -> str:
        """Peer id of this peer."""
        return self._identity.peer_id

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
        }

    def remember(self, name: str, text: str) -> None:
        """Writes a file of this peer for its next process."""
        with self._file(name):
            write_whole(self._folder / name, text)

    def remembered(self, name: str) -> str:
        """Reads a file of an earlier process; empty when there is none."""
        path = self._folder / name
        with self._file(name):
            return path.read_text(errors="replace") if path.exists() else ""
        return ""

    def _receive(self, message: VerifiedMessage) -> None:
        """Takes a verified message. Returns at once."""

    async def _periodic(self) -> None:
        """Does the periodic work, every `report_every_s`, after the ban list was read."""

    async def _listen(self) -> None:
        while True:
            for frame in await self._exchange.receive(INTAKE_BATCH):
                message = self._intake.read(self.ingress, frame, self._clock())
                if isinstance(message, VerifiedMessage):
                    self._receive(message)
                await asyncio.sleep(0)
            await self._intake.pause()

    async def _report(self) -> None:
        try:
            while True:
                self._read_bans()
                await self._periodic()
                self._write_status()
                await asyncio.sleep(self.report_every_s)
        finally:
            self._write_status()

    def _read_bans(self) -> None:
        with self._file(BANNED_FILE):
            self.ingress.banned.update(read_lines(self._folder / BANNED_FILE))

    def _write_status(self) -> None:
        with self._file(STATUS_FILE):
            write_whole(self._folder / STATUS_FILE, json.dumps(self.status()))

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
