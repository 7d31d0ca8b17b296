"""An envelope carries one payload between peers as signed, size-limited bytes.

    frame    = signature (64 bytes) + wire bytes of the Envelope (format version, msgpack)
    Envelope = schema, swarm, author's public key, session, sequence, time, body
    body     = one zstd frame that states its size

The signature covers all bytes after it, so no part can be changed or moved to another swarm or author. `session` is the
start of the author's process in Unix milliseconds, and `sequence` counts from 0 within it. Together they order an
author's messages across restarts, without a file.

Checks run in order of cost and stop at the first failure. `opened` checks size and schema, `is_genuine` the signature.
Only then `payload_of` decompresses, within the stated and allowed size.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import zstandard
from msgspec import Meta

from shoal import wire
from shoal.errors import WireError
from shoal.net.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, is_signed_by, peer_id_of

MAX_FRAME_BYTES = 256 * 1024
"""Bytes of a frame as it travels; servers allow 512 KiB."""
MAX_PAYLOAD_BYTES = 512 * 1024
"""Bytes of a decompressed body: sixty-four answers of 8 KB, or eight of 64 KB."""
MOST_RATIO = 32
"""Most bytes of a payload above `FREE_BYTES` per byte of its body; sampled answers have less than 10."""
FREE_BYTES = 64 * 1024
LEVEL = 3  # of compression: higher ones gain little on texts of a few KB
_SIGNED = b"shoal envelope\x00"  # what else the key may sign one day begins in another way
_DECOMPRESSOR = zstandard.ZstdDecompressor(max_window_size=MAX_PAYLOAD_BYTES)
_COMPRESSOR = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)

UnixTime = Annotated[float, Meta(ge=0, lt=2**40)]


@dataclass(frozen=True, slots=True)
class Envelope:
    """One signed message; `author` is the public key. The bounds of the fields hold for decoded envelopes."""

    schema: Literal[1]
    swarm: str
    author: Annotated[bytes, Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
    session: Annotated[int, Meta(ge=0, lt=2**53)]
    sequence: Annotated[int, Meta(ge=0, lt=2**53)]
    sent_s: UnixTime
    body: bytes

    @property
    def peer_id(self) -> str:
        """Peer id of the author."""
        return peer_id_of(self.author)


@dataclass(slots=True)
class Signer:
    """Signer of one node's messages in one swarm; numbers each."""

    identity: Identity
    swarm: str
    session: int
    """Number above that of every earlier process with this identity, such as Unix time in ms."""
    _sequence: int = 0

    def frame(self, payload: bytes, now_s: float) -> bytes:
        """Signs a payload. Raises `WireError` for a frame that every ingress filter would refuse."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise WireError(f"payload: expected at most {MAX_PAYLOAD_BYTES} bytes, got {len(payload)}")
        body = _COMPRESSOR.compress(payload)
        _check_ratio(len(payload), body)
        author = self.identity.public_key
        envelope = Envelope(1, self.swarm, author, self.session, self._sequence, now_s, body)
        frame = signed(self.identity, wire.encode(envelope))
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"frame: expected at most {MAX_FRAME_BYTES} bytes, got {len(frame)}")
        self._sequence += 1
        return frame


def signed(identity: Identity, data: bytes) -> bytes:
    """Prefixes an envelope's wire bytes with their signature."""
    return identity.sign(_SIGNED + data) + data


def opened(frame: bytes) -> Envelope:
    """Decodes a frame without checking its signature. Raises `WireError`."""
    return wire.decode(frame[SIGNATURE_BYTES:], Envelope, MAX_FRAME_BYTES - SIGNATURE_BYTES)


def is_genuine(frame: bytes, envelope: Envelope) -> bool:
    """Tells whether the envelope's author signed this frame."""
    return is_signed_by(envelope.author, frame[:SIGNATURE_BYTES], _SIGNED + frame[SIGNATURE_BYTES:])


def payload_of(envelope: Envelope) -> bytes:
    """Decompresses a body in bounded memory. Raises `WireError`."""
    try:
        size = zstandard.frame_content_size(envelope.body)
        if not 0 <= size <= MAX_PAYLOAD_BYTES:
            stated = "no size" if size < 0 else f"{size} bytes"
            raise WireError(f"body: expected a stated size of at most {MAX_PAYLOAD_BYTES} bytes, got {stated}")
        _check_ratio(size, envelope.body)
        # With the size stated, decompression stops with an error at the first byte too many.
        return _DECOMPRESSOR.decompress(envelope.body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"body: expected one zstd frame: {error}") from error


def _check_ratio(size: int, body: bytes) -> None:
    """Raises `WireError` for a small body that takes long to decode."""
    if size > max(FREE_BYTES, MOST_RATIO * len(body)):
        raise WireError(f"body: expected at most {MOST_RATIO} bytes of payload for each of its bytes, got {size}")
