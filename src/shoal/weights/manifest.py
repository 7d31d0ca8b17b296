"""Manifest of a Version: its files as shards named by their hashes. Also computes differences of shards.

A shard is a stretch of a file. Versions of one model lay out their tensors alike, so the shard at the same place in an
older Version has the same numbers before training. Both differ in few bits: their XOR, sorted by the position of each
byte within its number, compresses to a fraction.
"""

import os
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import zstandard

from shoal.errors import WireError
from shoal.files import PART_BYTES, digest_of, part_digests
from shoal.net.identity import Identity, is_signed_by

ROOT = "/v1"
"""Path below which Versions are served."""
SHARD_BYTES = PART_BYTES
LEVEL = 1
"""Level of zstd: higher levels take longer than they save on a fast network."""
WHOLE, DELTA = b"\0", b"\1"
"""First byte of an encoded shard."""
WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}
MOST_HEADER_BYTES = 100 << 20

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
"""Name of a file without a folder: received names must not contain paths."""
Size = Annotated[int, msgspec.Meta(ge=0, le=SHARD_BYTES)]


class WeightShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stretch of a file."""

    digest: Digest
    size: Size


class VersionFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """File as its shards, in order; `width` is the bytes of most of its numbers."""

    name: Name
    width: Annotated[int, msgspec.Meta(ge=1, le=8)]
    shards: tuple[WeightShard, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files of a Version."""

    version: Annotated[int, msgspec.Meta(ge=0)]
    files: tuple[VersionFile, ...]


class SignedManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Manifest with the run's signature."""

    manifest: bytes
    signature: bytes

    def opened(self, key: bytes, version: int) -> Manifest:
        """Manifest, if `key` signed it for `version`. Raises `WireError`."""
        if not is_signed_by(key, self.signature, self.manifest):
            raise WireError(f"manifest of version {version}: expected the signature of the run, got another")
        try:
            manifest = msgspec.json.decode(self.manifest, type=Manifest)
        except (msgspec.MsgspecError, ValueError) as error:
            raise WireError(f"manifest of version {version}: {error}") from error
        if manifest.version != version:
            raise WireError(f"manifest of version {version}: expected that version, got {manifest.version}")
        return manifest


def manifest_of(version: int, directory: Path, digests: Callable[[Path], tuple[str, ...]] = part_digests) -> Manifest:
    """Manifest of the files in a directory, without those in its folders; `digests` are a file's. Raises `OSError`."""
    files = [path for path in sorted(directory.iterdir()) if path.is_file()]
    return Manifest(version, tuple(_file(path, digests(path)) for path in files))


class KnownDigests:
    """Digests of the newest large files, so that each is hashed once; a file that has changed is hashed again."""

    KEPT = 8

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int, int], tuple[str, ...]] = {}

    def __call__(self, path: Path) -> tuple[str, ...]:
        """`part_digests` of a file. Raises `OSError`."""
        state = path.stat()
        key = state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
        if (known := self._known.get(key)) is not None:
            return known
        digests = part_digests(path)
        if len(digests) > 1:
            self._known[key] = digests
            for older in [*self._known][: -self.KEPT]:
                del self._known[older]
        return digests


KNOWN = KnownDigests()
"""Digests of this process: a Version is hashed when it is sealed, and its manifest is made of the same digests."""


def signed(manifest: Manifest, identity: Identity) -> SignedManifest:
    """Manifest with the signature of the run."""
    data = msgspec.json.encode(manifest)
    return SignedManifest(data, identity.sign(data))


def _file(path: Path, digests: Sequence[str]) -> VersionFile:
    size = os.path.getsize(path)
    sizes = (min(SHARD_BYTES, size - SHARD_BYTES * index) for index in range(len(digests)))
    return VersionFile(path.name, width_of(path), tuple(map(WeightShard, digests, sizes)))


def width_of(path: Path) -> int:
    """Bytes of most numbers in a safetensors file; 1 for other files."""
    if path.suffix != ".safetensors":
        return 1
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        header = msgspec.json.decode(file.read(min(size, MOST_HEADER_BYTES)))
    header.pop("__metadata__", None)
    held: Counter[int] = Counter()
    for tensor in header.values():
        begin, end = tensor["data_offsets"]
        held[WIDTHS.get(tensor["dtype"], 1)] += end - begin
    return held.most_common(1)[0][0] if held else 1


def encoded(shard: bytes, base: bytes | None, width: int) -> bytes:
    """Bytes to send for a shard: its difference to the receiver's `base`, or the shard itself if not longer.

    >>> len(encoded(b"abcd" * 1000, b"abcd" * 1000, 4)), len(encoded(b"abcd" * 1000, None, 4))
    (21, 4001)
    """
    if base is None or len(base) != len(shard):
        return WHOLE + shard
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(_planes(_xor(shard, base), width))
    return DELTA + bytes([width]) + packed if len(packed) + 1 < len(shard) else WHOLE + shard


def decoded(sent: bytes, base: bytes | None, shard: WeightShard) -> bytes:
    """WeightShard in the bytes that were sent. Raises `WireError` unless it has the size and the digest of `shard`."""
    data = sent[1:]
    if sent[:1] == DELTA:
        if base is None or len(base) != shard.size or not 1 <= (width := int.from_bytes(sent[1:2])) <= 8:
            raise WireError(f"shard {shard.digest[:16]}: expected a difference to what is here, got another")
        xor = decompressed(sent[2:], shard.size)
        data = _xor(_numbers(xor, width), base) if len(xor) == shard.size else b""
    if digest_of(data) != shard.digest:
        raise WireError(f"shard {shard.digest[:16]}: expected its hash, got other bytes")
    return data


def _xor(one: bytes, other: bytes) -> bytes:
    return np.bitwise_xor(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)).tobytes()


def _planes(data: bytes, width: int) -> bytes:
    """First bytes of all numbers, then all second ones, and so on; a rest shorter than a number stays at the end."""
    whole = len(data) - len(data) % width
    return np.frombuffer(data, np.uint8, whole).reshape(-1, width).T.tobytes() + data[whole:]


def _numbers(planes: bytes, width: int) -> bytes:
    """Undoes `_planes`."""
    whole = len(planes) - len(planes) % width
    return np.frombuffer(planes, np.uint8, whole).reshape(width, -1).T.tobytes() + planes[whole:]


def decompressed(data: bytes, most_bytes: int) -> bytes:
    """Content of one zstd frame. Raises `WireError` for other data, and for more than `most_bytes`.

    zstandard itself allocates any size that a frame states.
    """
    try:
        if (stated := zstandard.frame_content_size(data)) > most_bytes:
            raise WireError(f"expected at most {most_bytes} bytes in a zstd frame, got {stated}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=most_bytes)
    except zstandard.ZstdError as error:
        raise WireError(f"expected a zstd frame of at most {most_bytes} bytes: {error}") from error
