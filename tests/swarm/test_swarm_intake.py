"""A peer reads frames so that its other tasks go on: one at a time, and no more than its share of the processor."""

import asyncio
import itertools
import selectors
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.memory_swarm import MemorySwarm
from shoal import wire
from shoal.config import Config, TaskConfig
from shoal.net.identity import Identity
from shoal.swarm.peer import FOLLOWED_PER_S, FRAME_S, INTAKE_BATCH, INTAKE_BURST_S, INTAKE_PER_S, Joined, Peer
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.envelope import Signer
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout

NOW_S = 1.8e9
BATCHES = 3
FRAMES = BATCHES * INTAKE_BATCH
PAYLOAD = wire.encode(Offer(Claim("gcd", "?", "2"), (OfferedRollout("2"),), GeneratorKind.RULE, "m", NOW_S))


class Ahead(selectors.SelectSelector):
    """Waits for no timer: its time goes on to the next one."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += max(0.0, timeout or 0.0)
        return super().select(0)


class Skipping(asyncio.SelectorEventLoop):
    """An event loop in which sleeping takes no time, and nothing else takes any of its own."""

    def __init__(self) -> None:
        self._ahead = Ahead()
        super().__init__(self._ahead)

    def time(self) -> float:
        return self._ahead.now_s


class Costly:
    """A timer by which each look at it is a while later."""

    def __init__(self, look_s: float) -> None:
        self._look_s, self._now_s = look_s, 0.0

    def __call__(self) -> float:
        self._now_s += self._look_s
        return self._now_s


def read(folder: Path, timer: Callable[[], float], look_every_s: float) -> list[tuple[int, float]]:
    """How many of the frames that lie there a peer has read at each look, and when."""

    async def main() -> list[tuple[int, float]]:
        hub, other = MemorySwarm(), Identity.fresh()
        said = Signer(other, "reef", session=1)
        for _ in range(FRAMES):
            hub.put(other.peer_id, said.frame(PAYLOAD, NOW_S))
        own = OwnTasks([])
        config = Config(tasks=[TaskConfig(name="gcd")])
        peer = Peer(Joined(hub.join(), own, Identity.fresh(), folder, config, clock=lambda: NOW_S, timer=timer))
        listening = asyncio.create_task(peer.beside())
        looks = [(0, 0.0)]
        while peer.ingress.admitted < FRAMES:
            assert not listening.done()
            await asyncio.sleep(look_every_s)
            looks.append((peer.ingress.admitted, asyncio.get_running_loop().time()))
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        own.close()
        return looks

    with asyncio.Runner(loop_factory=Skipping) as runner:
        return runner.run(main())


def test_between_two_frames_other_tasks_have_their_turn(tmp_path: Path) -> None:
    counts = [count for count, _ in read(tmp_path, lambda: 0.0, 0.0)]
    assert max(after - before for before, after in itertools.pairwise(counts)) == 1


@pytest.mark.parametrize("frames_worth", [1.0, 60.0])
def test_frames_are_read_as_seldom_as_they_are_dear(tmp_path: Path, frames_worth: float) -> None:
    timer = Costly(frames_worth * FRAME_S / 3)  # the peer and its filter look at it so often while a frame is read
    _, took_s = read(tmp_path, timer, 0.25)[-1]
    before_last_batch = (BATCHES - 1) * INTAKE_BATCH * frames_worth
    assert took_s == pytest.approx(max(0.0, before_last_batch / INTAKE_PER_S - INTAKE_BURST_S), abs=0.5)


def test_a_flood_under_the_name_of_an_established_author_costs_no_more_than_its_intake(tmp_path: Path) -> None:
    seconds = 9

    async def main() -> tuple[int, int]:
        hub, own = MemorySwarm(), OwnTasks([])
        named, quiet = Identity.fresh(), Identity.fresh()
        said = Signer(named, "reef", session=1)
        config = Config(tasks=[TaskConfig(name="gcd")])
        peer = Peer(Joined(hub.join(), own, Identity.fresh(), tmp_path, config, clock=lambda: NOW_S, timer=lambda: 0.0))
        for author in (named, quiet):
            peer.ingress.vouch(author.peer_id)
        listening = asyncio.create_task(peer.beside())
        await asyncio.sleep(2)  # until it follows them
        for read in range(10 * seconds):
            for _ in range(1000):
                frame = said.frame(PAYLOAD, NOW_S)
                hub.put(named.peer_id, bytes(64) + frame[64:])
            if read == 5 * seconds:
                hub.put(quiet.peer_id, Signer(quiet, "reef", session=1).frame(PAYLOAD, NOW_S))
            await asyncio.sleep(0.1)
        assert not listening.done()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        own.close()
        return peer.ingress.refused[Reason.FORGED], peer.ingress.admitted

    with asyncio.Runner(loop_factory=Skipping) as runner:
        checked, admitted = runner.run(main())
    assert 0.8 * FOLLOWED_PER_S * seconds < checked <= FOLLOWED_PER_S * (seconds + 3)
    assert admitted == 1, "another established author is heard meanwhile"
