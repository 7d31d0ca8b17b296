"""`python -m benchmarks.flood URL WINDOWS ROUNDS RATE CLAIMS` sends frames of hostile peers, for `shoal bench hostile`.

It sends RATE frames a second to one swarm after the other, as WINDOWS says, ROUNDS times: `reef:12,-:30` is 12 s to the
swarm reef and 30 s of rest. The frames hold useless offers with true signatures of a thousand identities, one endless
author, forged signatures, replays, gaps, zip bombs and no msgpack at all. True questions, from the file CLAIMS, come
with answers that hang the scorer. A line announces each window.
"""

import asyncio
import random
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nats
import zstandard

from shoal import wire
from shoal.net.identity import Identity
from shoal.net.process import die_with_parent
from shoal.swarm.wire.envelope import Envelope, Signer, signed
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout

SYBILS = 1000
PER_FLOODER = 1000
BATCH = 100
LORISES = 50
BOMB_BYTES = 64 * 1024 * 1024
NOBODY = "-"
HANG = "9**9**9**9**9"
"""Arithmetic expression in countdown's syntax that hangs a scorer."""


def hostile_frames(swarm: str, now_s: float, claims: Sequence[Claim]) -> list[tuple[str, bytes]]:
    """Builds (author, frame) pairs, shuffled; each claim is offered with answers that hang."""
    rng = random.Random(0)
    made = Offer(Claim("gcd", "gcd of 1 and 1?", "1"), (OfferedRollout("7" * 400),) * 8, GeneratorKind.RULE, "x", now_s)
    payload = wire.encode(made)
    sybils = [Identity.fresh() for _ in range(SYBILS)]
    found = [(one.peer_id, Signer(one, swarm, session=1).frame(payload, now_s)) for one in sybils]
    flooder = Identity.fresh()
    signer = Signer(flooder, swarm, session=1)
    found += [(flooder.peer_id, signer.frame(payload, now_s)) for _ in range(PER_FLOODER)]
    found += [(author, bytes(64) + frame[64:]) for author, frame in found[:SYBILS]]  # forged
    bomb = zstandard.ZstdCompressor().compress(bytes(BOMB_BYTES))
    for one in sybils[:200]:
        for sequence, body in ((10**6, bomb), (10**9, b"no zstd")):
            envelope = Envelope(1, swarm, one.public_key, 1, sequence, now_s, body)
            found.append((one.peer_id, signed(one, wire.encode(envelope))))
        found.append((one.peer_id, rng.randbytes(2000)))
    for claim in claims:
        one = Identity.fresh()
        hanging = Offer(claim, (OfferedRollout(HANG),) * 4, GeneratorKind.RULE, "x", now_s)
        found.append((one.peer_id, Signer(one, swarm, session=1).frame(wire.encode(hanging), now_s)))
    rng.shuffle(found)
    return found


async def flood(
    url: str, windows: Sequence[tuple[str, float]], rounds: int, rate: float, claims: Sequence[Claim]
) -> None:
    """Sends to each swarm for its seconds, in several rounds."""
    client = await nats.connect(url)
    frames = {swarm: hostile_frames(swarm, time.time(), claims) for swarm, _ in windows if swarm != NOBODY}
    host, port = url.removeprefix("nats://").split(":")
    lorises = [socket.create_connection((host, int(port))) for _ in range(LORISES)]
    for one in lorises:
        one.sendall(b"CONNECT {}\r\nSUB shoal.> 1\r\nPU")
    position = 0
    for swarm, window_s in [*windows] * rounds:
        _say(f"{swarm} 0")
        began_s, sent = time.monotonic(), 0
        while (passed_s := time.monotonic() - began_s) < window_s:
            while swarm != NOBODY and sent < rate * passed_s:
                for _ in range(BATCH):
                    author, frame = frames[swarm][position % len(frames[swarm])]
                    await client.publish(f"shoal.{swarm}.offer.{author}", frame)
                    position += 1
                sent += BATCH
            await asyncio.sleep(0.005)
        _say(f"sent {sent}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    die_with_parent()
    _url, _windows, _rounds, _rate, _claims = sys.argv[1:]
    _parts = [(name, float(length)) for name, length in (window.split(":") for window in _windows.split(","))]
    _known = wire.decode(Path(_claims).read_bytes(), list[Claim])
    asyncio.run(flood(_url, _parts, int(_rounds), float(_rate), _known))
