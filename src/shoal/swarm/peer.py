"""What everybody in a swarm does: reads frames, keeps a ban list and a status, and signs what it says.

    listen   consumes frames of the exchange, one after the other; lets others run between two of them
    tell     reads banned.txt, does what is to be done now and then, and writes status.json

A file of people that cannot be read or written ends nobody: it is logged once, and said in the status.
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
    """One event loop. A node, a generator and a desk of people add what they do with what is heard."""

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
        """Why files of this peer could not be read or written last, by name."""
        self._read_bans()
        self._session = next_session(folder, clock())
        self._signer = Signer(identity, swarm, session=self._session)

    @property
    def peer_id(self) -> str:
        """Of this peer."""
        return self._identity.peer_id

    @property
    def connected(self) -> bool:
        """Whether the swarm can be reached now."""
        return self._exchange.connected

    def status(self) -> dict[str, object]:
        """What `shoal swarm status` shows of anybody."""
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
        """Keeps something in a file of this peer, for a life after this one."""
        with self._file(name):
            write_whole(self._folder / name, text)

    def remembered(self, name: str) -> str:
        """What an earlier life kept; nothing when there is none."""
        path = self._folder / name
        with self._file(name):
            return path.read_text(errors="replace") if path.exists() else ""
        return ""

    def _receive(self, message: VerifiedMessage) -> None:
        """Something was let in. Returns at once."""

    async def _periodic(self) -> None:
        """What is done every `tell_every_s`, after the ban list was read."""

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
        """Around the use of a file: what goes wrong is remembered, and logged when it is new."""
        try:
            yield
        except OSError as error:
            failure = f"{name}: {error}"
            if failure != self.file_failures.get(name):
                LOG.warning("swarm: %s", failure)
            self.file_failures[name] = failure
        else:
            self.file_failures.pop(name, None)
