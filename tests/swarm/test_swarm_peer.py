"""What every peer does with its clock, its folder and its exchange, whatever kind of peer it is."""

import asyncio
from pathlib import Path
from typing import Any

from benchmarks.memory_swarm import MemorySwarm
from shoal import wire
from shoal.config import Config, TaskConfig
from shoal.net.identity import Identity
from shoal.run.join_swarm import report_connection
from shoal.swarm.peer import Joined, Peer
from shoal.swarm.trust.ingress import IngressFilter, TrustLimits, VerifiedMessage
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.envelope import Signer
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout
from until import until

NOW_S = 1.8e9
OFFER = Offer(Claim("gcd", "gcd of 4 and 6?", "2"), (OfferedRollout("2"),) * 2, GeneratorKind.RULE, "", NOW_S)


class Clock:
    """Unix time that goes on by `step_s` with each look at it."""

    def __init__(self, now_s: float = NOW_S, step_s: float = 0.0) -> None:
        self.now_s, self.step_s = now_s, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def peer(hub: MemorySwarm, folder: Path, identity: Identity, clock: Clock) -> Peer:
    recogniser: Any = None  # only what a kind of peer does with an offer needs one
    return Peer(Joined(hub.join(), recogniser, identity, folder, Config(tasks=[TaskConfig(name="gcd")]), clock=clock))


async def test_how_often_an_author_is_heard_does_not_hang_on_the_reader_s_unix_time(tmp_path: Path) -> None:
    hub, author = MemorySwarm(), Signer(Identity.fresh(), "reef", session=1)
    reader = peer(hub, tmp_path, Identity.fresh(), Clock(step_s=100.0))
    reader.ingress = IngressFilter("reef", reader.peer_id, TrustLimits(rate_per_s=0.01, burst=4.0))
    for _ in range(20):
        hub.put("a", author.frame(wire.encode(OFFER), NOW_S))
    listening = asyncio.create_task(reader.beside())
    await until(lambda: reader.ingress.admitted + reader.ingress.refused.total() == 20)
    assert reader.ingress.refused == {Reason.FLOODING: 16}
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


async def test_a_peer_whose_clock_was_set_back_is_heard_in_its_next_process(tmp_path: Path) -> None:
    hub, identity, at = MemorySwarm(), Identity.fresh(), IngressFilter("reef", "reader")
    for now_s in (NOW_S, NOW_S - 3000.0, NOW_S - 3000.0):
        await peer(hub, tmp_path, identity, Clock(now_s))._share_offer(OFFER)
    assert len(hub.frames) == 3
    assert all(isinstance(at.admit(frame, NOW_S), VerifiedMessage) for _, frame in hub.frames.values())


def test_why_a_peer_cannot_reach_its_swarm_is_in_its_status(tmp_path: Path) -> None:
    hub = MemorySwarm()
    alone = peer(hub, tmp_path, Identity.fresh(), Clock())
    assert (alone.status()["connected"], alone.status()["failure"]) == (True, "")
    hub._peers[0].here.clear()
    assert (alone.status()["connected"], alone.status()["failure"]) == (False, "this peer is cut off")


async def test_a_run_reports_once_that_its_swarm_is_away_and_that_it_is_back(tmp_path: Path) -> None:
    hub, events = MemorySwarm(), list[tuple[str, str]]()
    alone = peer(hub, tmp_path, Identity.fresh(), Clock())

    def on_event(name: str, reason: str = "") -> None:
        events.append((name, reason))

    reporting = asyncio.create_task(report_connection(alone, on_event, every_s=0.001))
    hub._peers[0].here.clear()
    await until(lambda: bool(events))
    hub._peers[0].here.set()
    await until(lambda: len(events) == 2)
    reporting.cancel()
    await asyncio.wait([reporting])
    assert events == [("swarm_away", "this peer is cut off"), ("swarm_back", "")]
