"""Choice of the replica for a request, and order of loading new weights. Pure.

Rendezvous hashing gives each session an order of preference over the replicas, from a hash of both names. When a
replica joins or leaves, only the sessions that prefer it move. A session goes to the first replica of its order whose
load is below `BOUND` times the mean. A replica that many sessions prefer therefore stays fast (Mirrokni et al.,
Consistent Hashing with Bounded Loads, arXiv 1608.01350).
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil

from shoal.interfaces import EngineInfo

BOUND = 1.25
WAVE_SHARE = 0.25  # fraction of the replicas that load weights at the same time


class ReplicaState(StrEnum):
    """States of a replica."""

    READY = "ready"
    """The replica takes requests."""
    UPDATING = "updating"
    """The replica loads weights: its requests continue, and new requests go elsewhere where possible."""
    AWAY = "away"
    """The replica did not answer, or serves the wrong weights."""


@dataclass(frozen=True, slots=True)
class ReplicaHandle:
    """One replica as a request sees it."""

    name: str
    state: ReplicaState
    version: int
    """Version of the served weights; a request here gets tokens of this Version or a later one."""
    load: int
    """Sequences that the pool has running here."""


def session_key(session: str, token_ids: Collection[int]) -> bytes:
    """Key of a session; without a session, key of the prompt."""
    text = session.encode() if session else ",".join(map(str, token_ids)).encode()
    return hashlib.blake2b(text, digest_size=16).digest()


def oldest_served(handles: Sequence[ReplicaHandle], newest: int) -> int:
    """Oldest Version that may sample a token from now on: a replica that is away loads `newest` first."""
    served = (
        handle.version if handle.state is not ReplicaState.AWAY else max(handle.version, newest) for handle in handles
    )
    return min(served, default=newest)


def preference(key: bytes, names: Collection[str]) -> list[str]:
    """Names of the replicas in the session's order of preference."""
    return sorted(names, key=lambda name: hashlib.blake2b(name.encode(), key=key[:64], digest_size=8).digest())


def chosen(
    key: bytes, handles: Sequence[ReplicaHandle], *, count: int = 1, at_least: int = 0, avoid: Collection[str] = ()
) -> str | None:
    """Replica for `count` sequences of the session `key`; None when no replica may take them now.

    `at_least` is the Version of the answer's newest token: a replica with an older Version must not continue it.
    """
    open_ = [handle for handle in handles if handle.version >= at_least and handle.name not in avoid]
    among = [handle for handle in open_ if handle.state is ReplicaState.READY]
    among = among or [handle for handle in open_ if handle.state is ReplicaState.UPDATING]
    if not among:
        return None
    bound = ceil(BOUND * (sum(handle.load for handle in among) + count) / len(among))
    load = {handle.name: handle.load for handle in among}
    # The least loaded replica is below the mean, so one always qualifies.
    return next(name for name in preference(key, load) if load[name] < bound)


def waves(names: Sequence[str]) -> list[list[str]]:
    """Groups of replicas that load weights one after another; all replicas at once only if there is a single one."""
    size = max(1, int(len(names) * WAVE_SHARE))
    return [list(names[start : start + size]) for start in range(0, len(names), size)]


def summed(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Joins the states of several engines: sums, the mean busy share and the oldest version."""
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
