"""A node's dependencies, intake, files and counts have their home here."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.interfaces import Exchange, Recogniser, Renderer, Scorer
from shoal.swarm.encoding import Encoded
from shoal.swarm.offer import MAX_ROLLOUTS
from shoal.swarm.trust import IngressFilter, Reason, VerifiedMessage
from shoal.types import Reward

BANNED_FILE = "banned.txt"
STATUS_FILE = "status.json"
SESSION_FILE = "session"
INTAKE_PER_S = 60.0
"""Frames read per second at most, on average, from all peers together."""
FRAME_S = 0.5e-3
"""Seconds of a core that a frame may take; a slower frame counts as several. Most take 0.2 ms."""
INTAKE_BURST_S = 16.0
"""Seconds of intake that a late joiner, or a peer that was cut off, may read at once."""
OWN_COST = 0.25
"""Cost of reading an own frame, relative to another's: no signature is checked."""


@dataclass(frozen=True, slots=True)
class NodeDeps:
    """Dependencies of a node."""

    exchange: Exchange
    recogniser: Recogniser
    renderer: Renderer
    scorer: Scorer
    max_model_len: int
    model: str
    """Name of the model in offers."""
    most_answers: int = MAX_ROLLOUTS
    """Answers that count of an offer: as many as the node's own groups have."""


@dataclass(slots=True)
class ReadyOffer:
    """A verified offer with this node's rewards."""

    message: VerifiedMessage
    source: Encoded
    rewards: tuple[Reward, ...]
    uses: int = 0


@dataclass(slots=True)
class NodeCounts:
    """Counts since the start of a node."""

    shared: int = 0
    shared_bytes: int = 0
    unsent: int = 0
    """Own groups chosen for sharing that were too old, too many, or not portable."""
    taken: int = 0
    missing: int = 0
    """Groups that steps wanted and did not get."""


class Intake:
    """Rate limit of a node's reading, in frames and in processor time. One event loop."""

    def __init__(self, per_s: float = INTAKE_PER_S, timer: Callable[[], float] = time.thread_time) -> None:
        """`timer` returns the seconds of a core that this thread has used."""
        self._frame_s = 1 / per_s
        self.timer = timer
        self._due_s = -math.inf  # when what was read so far would have been read at the average rate

    def read(self, ingress: IngressFilter, frame: bytes, now_s: float) -> VerifiedMessage | Reason:
        """Passes a frame through the ingress filter and charges its cost; `now_s` is Unix time."""
        loop_s, began_s = asyncio.get_running_loop().time(), self.timer()
        message = ingress.admit(frame, now_s, loop_s)
        cost = max(OWN_COST if message is Reason.OWN else 1.0, (self.timer() - began_s) / FRAME_S)
        self._due_s = max(self._due_s, loop_s - INTAKE_BURST_S) + cost * self._frame_s
        return message

    async def pause(self) -> None:
        """Waits until more may be read."""
        await asyncio.sleep(max(0.0, self._due_s - asyncio.get_running_loop().time()))


def ban_in(folder: Path, peer_ids: Sequence[str]) -> None:
    """Adds peers to the ban list in a node's folder; a running node reads it within seconds. Raises `OSError`."""
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
