"""Choice of the replica for a request, and order of loading new weights. Pure.

Rendezvous hashing gives each session an order of preference over the replicas, from a hash of both names. When a
replica joins or leaves, only the sessions that prefer it move. A session goes to the first replica of its order whose
load is below `BOUND` times the mean. A replica that many sessions prefer therefore stays fast (Mirrokni et al.,
Consistent Hashing with Bounded Loads, arXiv 1608.01350).
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import ceil

from shoal.engine.pool.replica import Replica, ReplicaState
from shoal.interfaces import EngineInfo

BOUND = 1.25
WAVE_SHARE = 0.25  # fraction of the replicas that load weights at the same time


def session_key(session: str, token_ids: Collection[int]) -> bytes:
    """Key of a session; without a session, key of the prompt."""
    text = session.encode() if session else ",".join(map(str, token_ids)).encode()
    return hashlib.blake2b(text, digest_size=16).digest()


def oldest_served(replicas: Collection[Replica], newest: int) -> int:
    """Oldest Version that may sample a token from now on: a replica that is away loads `newest` first."""
    served = (max(r.version, newest) if r.state is ReplicaState.AWAY else r.version for r in replicas)
    return min(served, default=newest)


def preference(key: bytes, names: Collection[str]) -> list[str]:
    """Names of the replicas in the session's order of preference."""
    return sorted(names, key=lambda name: hashlib.blake2b(name.encode(), key=key[:64], digest_size=8).digest())


def chosen(
    key: bytes, replicas: Collection[Replica], *, count: int = 1, at_least: int = 0, avoid: Collection[str] = ()
) -> Replica | None:
    """Replica for `count` sequences of the session `key`; None when no replica may take them now.

    `at_least` is the Version of the answer's newest token: a replica with an older Version must not continue it.
    """
    open_ = [replica for replica in replicas if replica.version >= at_least and replica.name not in avoid]
    among = {replica.name: replica for replica in open_ if replica.state is ReplicaState.READY}
    among = among or {replica.name: replica for replica in open_ if replica.state is ReplicaState.UPDATING}
    if not among:
        return None
    bound = ceil(BOUND * (sum(replica.load for replica in among.values()) + count) / len(among))
    # The least loaded replica is below the mean, so one always qualifies.
    return next(among[name] for name in preference(key, among) if among[name].load < bound)


def waves(names: Sequence[str], share: float = WAVE_SHARE) -> list[list[str]]:
    """Groups of replicas that load weights one after another: a `share` of all, 0 for one by one, 1 for all at once."""
    size = max(1, int(len(names) * share))
    return [list(names[start : start + size]) for start in range(0, len(names), size)]


def summed(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Joins the states of several engines: sums, the mean busy share and the oldest version."""
    first = infos[0]
    totals = ("busy_share", "tokens_drawn", "tokens_prefilled", "interruptions", "running", "waiting")
    sums = {name: sum(getattr(info, name) for info in infos) for name in totals}
    return replace(
        first,
        **sums | {"busy_share": sums["busy_share"] / len(infos)},
        version=min(info.version for info in infos),
        checksum=first.checksum if len({info.checksum for info in infos}) == 1 else "",
        max_model_len=min(info.max_model_len for info in infos),
    )
