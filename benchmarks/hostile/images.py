"""Images that attack their readers: bombs, wrong types, cut and damaged files, lies about sizes."""

import io
import random
import struct
import zlib
from collections.abc import Mapping

HEAD = b"\x89PNG\r\n\x1a\n"
BOMB_BYTES = 1 << 30


def chunk(name: bytes, data: bytes, crc: int | None = None) -> bytes:
    """A chunk of a PNG, by default with the right checksum."""
    return (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data) if crc is None else crc)
    )


def png(width: int, height: int, data: bytes, *, depth: int = 8, colour: int = 0, more: bytes = b"") -> bytes:
    """A PNG with this compressed data, whatever its head says."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return HEAD + head + more + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def bomb(size_bytes: int) -> bytes:
    """Zeros, compressed a thousandfold."""
    made, packer, block = io.BytesIO(), zlib.compressobj(9), bytes(1 << 20)
    for _ in range(size_bytes >> 20):
        made.write(packer.compress(block))
    made.write(packer.flush())
    return made.getvalue()


def images() -> Mapping[str, bytes]:
    """Hostile files by name; none of them is a grey PNG of at most 32 by 32 dots."""
    dots = zlib.compress(bytes(9 * 8))
    good = png(8, 8, dots)
    rng = random.Random(0)
    return {
        "bomb in few dots": png(8, 8, bomb(32 << 20)),
        "bomb in many dots": png(1 << 15, 1 << 15, bomb(32 << 20)),
        "largest size": png(2**31 - 1, 2**31 - 1, dots),
        "no size": png(0, 0, dots),
        "bomb in a comment": png(8, 8, b"", more=chunk(b"zTXt", b"a\0\0" + bomb(16 << 20))),
        "cut in its data": good[:-20],
        "cut in its head": good[:12],
        "head alone": HEAD,
        "no end": good[:-12],
        "wrong checksum": HEAD + chunk(b"IHDR", bytes(13), crc=1),
        "length beyond the file": HEAD + struct.pack(">I", 2**32 - 1) + b"IHDR",
        "data that is no zlib": png(8, 8, b"no zlib"),
        "too little data": png(8, 8, zlib.compress(bytes(5))),
        "too much data": png(8, 8, zlib.compress(bytes(500))),
        "endless data": png(8, 8, dots[:-6]),
        "filters": png(8, 8, zlib.compress(bytes([4] * 72))),
        "sixteen bits": png(8, 8, dots, depth=16),
        "palette that is missing": png(8, 8, dots, colour=3),
        "a million chunks": HEAD + chunk(b"tEXt", b"") * 5000 + chunk(b"IEND", b""),
        "jpeg called png": b"\xff\xd8\xff\xe0" + rng.randbytes(100),
        "page called png": b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
        "program called png": b"\x7fELF" + rng.randbytes(200),
        "pickle called png": b"\x80\x04\x95cos\nsystem\n",
        "png and a program": good + b"\x7fELF" + rng.randbytes(200),
        "noise": HEAD + rng.randbytes(1000),
    }
