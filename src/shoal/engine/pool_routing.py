"""Which engine of many takes a request, and in which order they load new weights. Pure.

Each session has an order of preference over the engines, from a hash of both names (rendezvous hashing): when an engine
comes or goes, only the sessions that prefer it move. A session goes to the first engine of its order whose load is
below `BOUND` times the mean, so that an engine many sessions prefer does not become the slow one (Mirrokni et al.,
Consistent Hashing with Bounded Loads, arXiv 1608.01350).
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil

from shoal.interfaces import EngineInfo

BOUND = 1.25
WAVE_SHARE = 0.25  # of the engines that load weights at the same time


class ReplicaState(StrEnum):
    """What an engine of the pool is good for."""

    READY = "ready"
    """It takes requests."""
    UPDATING = "updating"
    """It loads weights: its requests go on, new ones go elsewhere where there is an elsewhere."""
    AWAY = "away"
    """It did not answer, or serves weights that it should not."""


@dataclass(frozen=True, slots=True)
class ReplicaHandle:
    """One engine as a request sees it."""

    name: str
    state: ReplicaState
    version: int
    """Of the weights it serves; a request that draws there gets tokens of this Version or a later one."""
    load: int
    """Sequences that the pool has there."""


def session_key(session: str, token_ids: Collection[int]) -> bytes:
    """The key of a session; of one prompt where there is none."""
    text = session.encode() if session else ",".join(map(str, token_ids)).encode()
    return hashlib.blake2b(text, digest_size=16).digest()


class SessionVersions:
    """The newest Version that drew a token of each session, for as long as some engine is behind it."""

    def __init__(self) -> None:
        self._newest: dict[bytes, int] = {}

    def newest(self, key: bytes) -> int:
        """The Version that whoever goes on with a session must serve at least."""
        return self._newest.get(key, 0)

    def drew(self, key: bytes, version: int, oldest: int) -> None:
        """Records a session's newest token; `oldest` is the oldest Version that an engine serves."""
        if version > oldest:
            self._newest[key] = max(version, self.newest(key))

    def forget(self, oldest: int) -> None:
        """Forgets the sessions with which every engine may go on."""
        self._newest = {key: version for key, version in self._newest.items() if version > oldest}


def oldest_served(seats: Sequence[ReplicaHandle], newest: int) -> int:
    """The oldest Version under which a token may be drawn from now on: who is away loads the `newest` first."""
    served = (seat.version if seat.state is not ReplicaState.AWAY else max(seat.version, newest) for seat in seats)
    return min(served, default=newest)


def preference(key: bytes, names: Collection[str]) -> list[str]:
    """The engines in the order in which the session `key` wants them."""
    return sorted(names, key=lambda name: hashlib.blake2b(name.encode(), key=key[:64], digest_size=8).digest())


def chosen(
    key: bytes, seats: Sequence[ReplicaHandle], *, count: int = 1, at_least: int = 0, avoid: Collection[str] = ()
) -> str | None:
    """The engine for `count` sequences of the session `key`; None when none may have them now.

    `at_least` is the version of the newest token that an answer has already: an older engine must not go on with it.
    """
    open_ = [seat for seat in seats if seat.version >= at_least and seat.name not in avoid]
    among = [seat for seat in open_ if seat.state is ReplicaState.READY]
    among = among or [seat for seat in open_ if seat.state is ReplicaState.UPDATING]
    if not among:
        return None
    bound = ceil(BOUND * (sum(seat.load for seat in among) + count) / len(among))
    load = {seat.name: seat.load for seat in among}
    # The least loaded one is below the mean, so that there always is such an engine.
    return next(name for name in preference(key, load) if load[name] < bound)


def waves(names: Sequence[str]) -> list[list[str]]:
    """The engines in groups that load weights one after another: never all of them at once, unless there is one."""
    size = max(1, int(len(names) * WAVE_SHARE))
    return [list(names[start : start + size]) for start in range(0, len(names), size)]


def summed(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Several engines as one: sums, the mean of busy shares, and the oldest version."""
    first = infos[0]
    checksums = {info.checksum for info in infos}
    return replace(
        first,
        version=min(info.version for info in infos),
        checksum=first.checksum if len(checksums) == 1 else "",
        max_model_len=min(info.max_model_len for info in infos),
        busy_share=sum(info.busy_share for info in infos) / len(infos),
        tokens_drawn=sum(info.tokens_drawn for info in infos),
        tokens_prefilled=sum(info.tokens_prefilled for info in infos),
        interruptions=sum(info.interruptions for info in infos),
        running=sum(info.running for info in infos),
        waiting=sum(info.waiting for info in infos),
    )
