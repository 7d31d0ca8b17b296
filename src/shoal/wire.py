"""Bytes <-> values: msgpack with a format version in front and a size limit. Never pickle.

The first byte is the format version; the rest is the msgpack of a dataclass of `shoal.types` (or any other type that
msgspec supports), validated during decoding.
"""

from typing import TypeVar

import msgspec

from shoal.errors import WireError

FORMAT = 1
MAX_BYTES = 64 * 1024 * 1024

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode(value: object) -> bytes:
    """The bytes of a value; `decode` with the same type gives an equal one."""
    return bytes([FORMAT]) + _encoder.encode(value)


def sendable(text: str) -> str:
    """The text with ? for each half of a surrogate pair, which JSON in an answer can spell and UTF-8 cannot.

    >>> sendable("5 \\ud800")
    '5 ?'
    """
    return text.encode(errors="replace").decode()


def decode(data: bytes, type_: type[T], max_bytes: int = MAX_BYTES) -> T:
    """The value of type `type_` in `data`. Raises `WireError` for all other data."""
    if len(data) > max_bytes:
        raise WireError(f"expected at most {max_bytes} bytes, got {len(data)}")
    if not data or data[0] != FORMAT:
        raise WireError(f"expected wire format {FORMAT}, got {data[0] if data else 'no bytes'}")
    try:
        return msgspec.msgpack.decode(memoryview(data)[1:], type=type_)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # too deep, even in an unknown field
        raise WireError(f"expected a {getattr(type_, '__name__', type_)}: {error}") from error
