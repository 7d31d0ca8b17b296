"""Checksums of files: in parallel, and once for a sealed Version."""

import hashlib
from pathlib import Path

import pytest

from shoal.files import MODEL_FILE, PART_BYTES, checksum, digest_of, has_checksum, part_digests
from shoal.weights.manifest import KNOWN, manifest_of
from shoal.weights.store import WeightStore


def flat(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 7])
def test_a_checksum_is_that_of_the_parts_in_their_order(tmp_path: Path, size: int) -> None:
    data, file = (b"0123456789abcdef!" * (size // 17 + 1))[:size], tmp_path / "file"
    file.write_bytes(data)
    parts = [digest_of(data[begin : begin + PART_BYTES]) for begin in range(0, size, PART_BYTES)]
    assert part_digests(file) == tuple(parts)
    of_parts = "parts-" + flat("".join(parts).encode())
    assert checksum(file) == (of_parts if len(parts) > 1 else flat(data))
    assert has_checksum(file, checksum(file))


def test_one_other_byte_or_two_parts_in_the_other_order_are_another_file(tmp_path: Path) -> None:
    file, data = tmp_path / "file", bytes(PART_BYTES) + b"\1" * PART_BYTES
    file.write_bytes(data)
    before = checksum(file)
    for other in (data[:-1] + b"\2", data[PART_BYTES:] + data[:PART_BYTES]):
        file.write_bytes(other)
        assert not has_checksum(file, before)


def test_a_manifest_has_the_digests_of_the_seal_and_a_file_that_changed_is_hashed_again(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    (store.begin(1) / MODEL_FILE).write_bytes(b"a" * (PART_BYTES + 1))
    (store.directory_of(1).with_name("v1.unfinished") / "model.txt").write_bytes(b"b")
    path = store.seal(1).path.rename(tmp_path / "v1" / "model.bin")
    known = KNOWN(path)
    assert known is KNOWN(path)
    manifest = manifest_of(1, path.parent, KNOWN)
    assert manifest == manifest_of(1, path.parent)
    path.write_bytes(b"a" * PART_BYTES + b"bb")
    assert KNOWN(path) == part_digests(path) != known
