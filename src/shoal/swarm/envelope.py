"""An envelope carries one payload between peers as signed, size-limited bytes.

    frame    = signature (64 bytes) + wire bytes of the Envelope (format version, msgpack)
    Envelope = schema, swarm, author's public key, session, sequence, time, kind, body
    body     = one zstd frame that states its size

The signature covers all bytes after it, so no part can be changed or moved to another swarm or author. `session` is the
start of the author's process in Unix milliseconds, and `sequence` counts from 0 within it. Together they order an
author's messages across restarts, without a file.

Checks run in order of cost and stop at the first failure. `opened` checks size and schema, `is_genuine` the signature.
Only then `payload_of` decompresses, within the stated and allowed size.
"""

from dataclasses import dataclass
from enum import StrEnum

import zstandard

from shoal import wire
from shoal.errors import WireError
from shoal.swarm.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, is_signed_by, peer_id_of

SCHEMA = 1
MAX_FRAME_BYTES = 256 * 1024
"""Bytes of a frame as it travels; servers allow 512 KiB."""
MAX_PAYLOAD_BYTES = 512 * 1024
"""Bytes of a decompressed body: sixty-four answers of 8 KB, or eight of 64 KB."""
LEVEL = 3  # of compression: higher ones gain little on texts of a few KB
_SIGNED = b"shoal envelope\x00"  # what else the key may sign one day begins in another way
_DECOMPRESSOR = zstandard.ZstdDecompressor(max_window_size=MAX_PAYLOAD_BYTES)
_COMPRESSOR = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)


class Kind(StrEnum):
    """Type of an envelope's payload."""

    OFFER = "offer"
    WANT = "want"


@dataclass(frozen=True, slots=True)
class Envelope:
    """One signed message; `author` is the public key."""

    schema: int
    swarm: str
    author: bytes
    session: int
    sequence: int
    sent_s: float  # Unix time
    kind: Kind
    body: bytes

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"envelope schema: expected {SCHEMA}, got {self.schema}")
        if len(self.author) != PUBLIC_KEY_BYTES:
            raise ValueError(f"author: expected {PUBLIC_KEY_BYTES} bytes, got {len(self.author)}")
        if not (0 <= self.session < 2**53 and 0 <= self.sequence < 2**53):
            raise ValueError(f"session and sequence: expected 0 to 2**53, got {self.session} and {self.sequence}")
        if not 0 <= self.sent_s < 2**40:  # also false for NaN
            raise ValueError(f"sent_s: expected a Unix time, got {self.sent_s}")

    @property
    def peer_id(self) -> str:
        """Peer id of the author."""
        return peer_id_of(self.author)


class Signer:
    """Signer of one node's messages in one swarm; numbers each."""

    def __init__(self, identity: Identity, swarm: str, *, session: int) -> None:
        """`session` must exceed that of every earlier process with this identity; Unix time in ms does."""
        self._identity = identity
        self._swarm = swarm
        self._session = session
        self._sequence = 0

    def frame(self, kind: Kind, payload: bytes, now_s: float) -> bytes:
        """Signs a payload. Raises `WireError` for a frame that every ingress filter would refuse."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise WireError(f"payload: expected at most {MAX_PAYLOAD_BYTES} bytes, got {len(payload)}")
        body = _COMPRESSOR.compress(payload)
        author = self._identity.public_key
        envelope = Envelope(SCHEMA, self._swarm, author, self._session, self._sequence, now_s, kind, body)
        frame = signed(self._identity, wire.encode(envelope))
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"frame: expected at most {MAX_FRAME_BYTES} bytes, got {len(frame)}")
        self._sequence += 1
        return frame


def signed(identity: Identity, data: bytes) -> bytes:
    """Prefixes an envelope's wire bytes with their signature."""
    return identity.sign(_SIGNED + data) + data


def opened(frame: bytes) -> Envelope:
    """Decodes a frame without checking its signature. Raises `WireError`."""
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"frame: expected at most {MAX_FRAME_BYTES} bytes, got {len(frame)}")
    return wire.decode(frame[SIGNATURE_BYTES:], Envelope, MAX_FRAME_BYTES)


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
        # With the size stated, decompression stops with an error at the first byte too many.
        return _DECOMPRESSOR.decompress(envelope.body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"body: expected one zstd frame: {error}") from error
