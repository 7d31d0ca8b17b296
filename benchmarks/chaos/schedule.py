"""When which fault comes: a pure function of a seed, so that a seed replays a schedule."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How something goes wrong."""

    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after a while."""
    FULL_DISK = "full_disk"
    """The run directory's file system has no byte left (ENOSPC) for a while."""
    LOCKED_LOG = "locked_log"
    """Another process holds a write transaction on log.sqlite."""
    CUT_FRAME = "cut_frame"
    """Clients of the engine's port send garbage and halves of requests, and hang up."""
    SLOW_ENGINE = "slow_engine"
    """The engine gets a small part of its time."""
    LYING_PEER = "lying_peer"
    """Hostile frames come from the swarm."""
    CLOCK = "clock"
    """The wall clock of all processes of the run jumps, back or forth."""


class Role(StrEnum):
    """A process of a run."""

    MAIN = "main"
    ENGINE = "engine"
    TRAINER = "trainer"
    REWARDS = "rewards"
    DRAWER = "drawer"
    SANDBOX = "sandbox"


PROCESS_KINDS = (Kind.KILL, Kind.STOP)
"""Faults that are of one process."""
WEIGHTS = {
    Kind.KILL: 8,
    Kind.STOP: 6,
    Kind.FULL_DISK: 1,
    Kind.LOCKED_LOG: 2,
    Kind.CUT_FRAME: 2,
    Kind.SLOW_ENGINE: 1,
    Kind.LYING_PEER: 1,
    Kind.CLOCK: 2,
}
LONGEST_HOLD_S = {Kind.STOP: 4.0, Kind.FULL_DISK: 5.0, Kind.LOCKED_LOG: 4.0, Kind.SLOW_ENGINE: 4.0}
AT_START = 0.3
"""Share of the faults that come while the run is still starting or resuming."""
LONGEST_WAIT_S = 1.0
LONGEST_JUMP_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and when it comes."""

    kind: Kind
    role: Role | None
    """Whose process, of a fault that is of one."""
    at_start: bool
    """Whether it may hit a run that has not made a step since it was started or resumed."""
    after_s: float
    """From there, or from the end of the fault before."""
    hold_s: float
    jump_s: float
    """Of the clock, against true time."""
    seed: int
    """Of what is sent."""

    @property
    def name(self) -> str:
        """Kind and role."""
        return self.kind.value if self.role is None else f"{self.kind} {self.role}"


def schedule(seed: int) -> Iterator[Fault]:
    """All faults of a seed, without end."""
    dice = random.Random(f"chaos {seed}")
    while True:
        (kind,) = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))
        role = dice.choice(list(Role))
        yield Fault(
            kind,
            role if kind in PROCESS_KINDS else None,
            dice.random() < AT_START,
            dice.uniform(0.0, LONGEST_WAIT_S),
            dice.uniform(0.2, LONGEST_HOLD_S.get(kind, 1.0)),
            dice.choice([-1, 1]) * LONGEST_JUMP_S ** dice.random(),
            dice.getrandbits(32),
        )
