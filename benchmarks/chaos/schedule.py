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


PROCESS_KINDS = {
    Kind.KILL: {
        Role.MAIN: 1,
        Role.ENGINE: 2,
        Role.TRAINER: 1,
        Role.REWARDS: 3,
        Role.DRAWER: 3,
        Role.SANDBOX: 2,
    },
    Kind.STOP: dict.fromkeys(Role, 1),
}
"""Faults that are of one process, and how often of which: without main process or trainer a run ends, and most of the
time goes into starting it again."""
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
LONGEST_WAIT_S = 2.0
LONGEST_START_S = 12.0
LONGEST_JUMP_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and when it comes."""

    kind: Kind
    role: Role | None
    """Whose process, of a fault that is of one."""
    at_start: bool
    """Whether it may hit a run that has not made a step since it was started or resumed."""
    age_s: float
    """Of a run that it hits while starting."""
    after_s: float
    """From there, or from the beginning of the fault before, which may still go on."""
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
        roles = PROCESS_KINDS.get(kind)
        yield Fault(
            kind,
            dice.choices(list(roles), list(roles.values()))[0] if roles else None,
            dice.random() < AT_START,
            dice.uniform(0.0, LONGEST_START_S),
            LONGEST_WAIT_S * dice.random() ** 2,  # many come close together
            dice.uniform(0.2, LONGEST_HOLD_S.get(kind, 1.0)),
            dice.choice([-1, 1]) * LONGEST_JUMP_S ** dice.random(),
            dice.getrandbits(32),
        )
