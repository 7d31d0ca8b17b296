"""`python -m shoal.bench.flood URL SWARM OTHER WINDOW_S WINDOWS RATE`: hostile peers, for `shoal bench hostile`.

Sends RATE frames a second to SWARM in every other window of time, to OTHER in between, so that what the machine does
for the flood itself is the same in both. The frames: a thousand identities with true signatures and useless offers, one
author without end, forged signatures, replays, gaps, zip bombs, no msgpack at all. A line announces each window.
"""

import asyncio
import random
import socket
import sys
import time
from collections.abc import Sequence

import nats
import zstandard

from shoal import wire
from shoal.interfaces import Claim
from shoal.process import die_with_parent
from shoal.swarm import offer as offers
from shoal.swarm.envelope import SCHEMA, Envelope, Kind, Seal, signed
from shoal.swarm.identity import Identity
from shoal.swarm.offer import GeneratorKind, Offer, OfferedRollout

SYBILS = 1000
PER_FLOODER = 1000
BATCH = 100
LORISES = 50
BOMB_BYTES = 64 * 1024 * 1024


def hostile_frames(swarm: str, now_s: float) -> list[tuple[str, bytes]]:
    """(author, frame), shuffled."""
    rng = random.Random(0)
    made = Offer(Claim("gcd", "gcd of 1 and 1?", "1"), (OfferedRollout("7" * 400),) * 8, GeneratorKind.RULE, "x", now_s)
    payload = offers.encode(made)
    sybils = [Identity.fresh() for _ in range(SYBILS)]
    found = [(one.peer_id, Seal(one, swarm, session=1).frame(Kind.OFFER, payload, now_s)) for one in sybils]
    flooder = Identity.fresh()
    seal = Seal(flooder, swarm, session=1)
    found += [(flooder.peer_id, seal.frame(Kind.OFFER, payload, now_s)) for _ in range(PER_FLOODER)]
    found += [(author, bytes(64) + frame[64:]) for author, frame in found[:SYBILS]]  # forged
    bomb = zstandard.ZstdCompressor().compress(bytes(BOMB_BYTES))
    for one in sybils[:200]:
        for sequence, body in ((10**6, bomb), (10**9, b"no zstd")):
            envelope = Envelope(SCHEMA, swarm, one.public_key, 1, sequence, now_s, Kind.OFFER, body)
            found.append((one.peer_id, signed(one, wire.encode(envelope))))
        found.append((one.peer_id, rng.randbytes(2000)))
    rng.shuffle(found)
    return found


async def flood(url: str, swarms: Sequence[str], window_s: float, windows: int, rate: float) -> None:
    """Sends, window after window, to the first swarm and the second in turn, beginning with the second."""
    client = await nats.connect(url)
    frames = {swarm: hostile_frames(swarm, time.time()) for swarm in swarms}
    host, port = url.removeprefix("nats://").split(":")
    lorises = [socket.create_connection((host, int(port))) for _ in range(LORISES)]
    for one in lorises:
        one.sendall(b"CONNECT {}\r\nSUB shoal.> 1\r\nPU")
    sent = 0
    for window in range(windows):
        swarm = swarms[(window + 1) % 2]
        began_s, sent_here = time.monotonic(), 0
        sys.stdout.write(f"{swarm} {time.time()}\n")
        sys.stdout.flush()
        while (passed_s := time.monotonic() - began_s) < window_s:
            while sent_here < rate * passed_s:
                for _ in range(BATCH):
                    author, frame = frames[swarm][sent % len(frames[swarm])]
                    await client.publish(f"shoal.{swarm}.offer.{author}", frame)
                    sent += 1
                sent_here += BATCH
            await asyncio.sleep(0.005)
        sys.stdout.write(f"sent {sent_here}\n")
    sys.stdout.write(f"end {time.time()}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    die_with_parent()
    _url, _swarm, _other, _window_s, _windows, _rate = sys.argv[1:]
    asyncio.run(flood(_url, (_swarm, _other), float(_window_s), int(_windows), float(_rate)))
