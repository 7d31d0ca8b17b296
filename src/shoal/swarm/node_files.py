"""What a member of a swarm works with, how fast it reads, what it remembers in files, and what it counts."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from shoal.interfaces import Exchange, Recogniser, Renderer, Scorer
from shoal.swarm.encoding import Encoded
from shoal.swarm.offer import MAX_ROLLOUTS
from shoal.swarm.trust import Letter, Reason
from shoal.types import Reward

BANNED_FILE = "banned.txt"
STATUS_FILE = "status.json"
INTAKE_PER_S = 60.0
"""Frames that a member reads per second at most, on average: 0.2 ms each, 1 % of a core, whoever sends how many."""
INTAKE_BURST_S = 16.0
"""What would be read in this time may be read at once, by who joins late or was cut off."""
OWN_COST = 0.25
"""Of reading one's own frame, beside another's: no signature is checked."""


class Settings(Protocol):
    """What a node reads of `config.SwarmConfig`."""

    @property
    def name(self) -> str:
        """Of the swarm."""
        ...

    @property
    def external_groups(self) -> int | Literal["adaptive"]:
        """Groups of peers that a step wants."""
        ...

    @property
    def share(self) -> str:
        """Name of a sharer."""
        ...

    @property
    def take(self) -> str:
        """Name of a taker."""
        ...

    @property
    def credit(self) -> str:
        """What peers' answers are compared with: begins with `group` or `skill`."""
        ...

    @property
    def fresh_s(self) -> float:
        """Age above which nothing is taken."""
        ...

    @property
    def reuse(self) -> int:
        """How often one group may be taken."""
        ...


@dataclass(frozen=True, slots=True)
class Means:
    """What a node works with."""

    exchange: Exchange
    recogniser: Recogniser
    renderer: Renderer
    scorer: Scorer
    max_model_len: int
    model: str
    """Its name, told to others."""
    most_answers: int = MAX_ROLLOUTS
    """Of an offer: as many as the node's own groups have."""


@dataclass(slots=True)
class Ready:
    """A verified offer with this node's rewards."""

    letter: Letter
    source: Encoded
    rewards: tuple[Reward, ...]
    uses: int = 0


@dataclass(slots=True)
class Tally:
    """What a node did so far."""

    shared: int = 0
    shared_bytes: int = 0
    unsent: int = 0
    """Own groups that were to be shared and could not be: too old by the time, too many, or not portable."""
    taken: int = 0
    missing: int = 0
    """Groups that steps wanted and were not there."""


class Intake:
    """Bounds what a member reads. One event loop."""

    def __init__(self, per_s: float = INTAKE_PER_S) -> None:
        self._frame_s = 1 / per_s
        self._due_s = -math.inf  # when what was read so far would have been read at the average rate

    def read(self, letter: Letter | Reason) -> None:
        """A frame was read, and this came of it."""
        now_s = asyncio.get_running_loop().time()
        cost = OWN_COST if letter is Reason.OWN else 1.0
        self._due_s = max(self._due_s, now_s - INTAKE_BURST_S) + cost * self._frame_s

    async def pause(self) -> None:
        """Waits until more may be read."""
        await asyncio.sleep(max(0.0, self._due_s - asyncio.get_running_loop().time()))


def ban_in(folder: Path, peer_ids: Sequence[str]) -> None:
    """Adds peers to the ban list in a node's folder; a running node reads it within seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / BANNED_FILE
    before = path.read_text() if path.exists() else ""
    with path.open("a") as file:
        if before and not before.endswith("\n"):
            file.write("\n")  # people edit it too
        file.writelines(f"{peer_id}\n" for peer_id in peer_ids)


def read_lines(path: Path) -> list[str]:
    """The words of a file; none without one."""
    return path.read_text().split() if path.exists() else []


def write_status(folder: Path, values: Mapping[str, object]) -> None:
    """Replaces status.json, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{STATUS_FILE}.unfinished"
    unfinished.write_text(json.dumps(dict(values)))
    unfinished.replace(folder / STATUS_FILE)
