"""Versions over real HTTP: what is sent, what is refused and what is repaired."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shoal.errors import EngineUnavailable, WireError
from shoal.files import MODEL_FILE, digest_of
from shoal.net.client import Client
from shoal.net.identity import Identity
from shoal.net.run_server import RunServer
from shoal.weights.manifest import SHARD_BYTES, WeightShard, decoded, encoded, manifest_of, signed, width_of
from shoal.weights.pull import VersionPuller
from shoal.weights.serving import VersionServer
from shoal.weights.store import WeightStore

IDENTITY = Identity.fresh()
NUMBERS = 3 * SHARD_BYTES // 8
"""Of float32: one and a half shards."""


def write(store: WeightStore, version: int, change: float = 0.0) -> bytes:
    """A Version whose first half differs a little from that of the others."""
    numbers = np.random.default_rng(0).standard_normal(NUMBERS).astype(np.float32)
    numbers[: NUMBERS // 2] *= 1 + change
    save_file({"weight": numbers}, store.begin(version) / MODEL_FILE)
    return store.seal(version).path.read_bytes()


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "run" / "weights")


@pytest.fixture
def served(tmp_path: Path, store: WeightStore) -> Iterator[tuple[RunServer, VersionServer]]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    versions = VersionServer(store, model, IDENTITY)
    with RunServer(versions.routes, token="secret") as server:
        yield server, versions


def pulled(server: RunServer, folder: Path, *versions: int, token: str = "secret", key: bytes = b"") -> VersionPuller:
    """A host that pulled some Versions, one after the other."""

    async def pull() -> VersionPuller:
        client = Client(server.url, token=token)
        puller = VersionPuller(client, folder, key or IDENTITY.public_key)
        try:
            for version in versions:
                await puller.pull(version)
        finally:
            await client.aclose()
        return puller

    return asyncio.run(pull())


Served = tuple[RunServer, VersionServer]


def test_a_version_arrives_as_it_was_written_and_the_next_one_as_a_difference(
    served: Served, store: WeightStore, tmp_path: Path
) -> None:
    first, second = write(store, 1), write(store, 2, change=1e-4)
    puller = pulled(served[0], tmp_path / "host", 0, 1, 2)
    assert (puller.directory_of(0) / "config.json").read_text() == "{}"
    assert (puller.directory_of(1) / MODEL_FILE).read_bytes() == first
    assert (puller.directory_of(2) / MODEL_FILE).read_bytes() == second
    assert puller.last.full_bytes > len(second)
    assert puller.last.sent_bytes < 0.6 * len(second), "half of the numbers differ, in their low bits"
    assert puller.last.repaired == 0
    assert (puller.directory_of(2) / "checksum").read_text() == store.kept(2).checksum  # type: ignore[union-attr]


def test_a_shard_that_is_the_same_is_not_sent(served: Served, store: WeightStore, tmp_path: Path) -> None:
    write(store, 1)
    write(store, 2)
    assert pulled(served[0], tmp_path / "host", 1, 2).last.sent_bytes == 0


@pytest.mark.parametrize("damage", [False, True])
def test_a_host_that_starts_again_fetches_a_version_only_if_it_has_it_not_whole(
    served: Served, store: WeightStore, tmp_path: Path, damage: bool
) -> None:
    data = write(store, 1)
    file = pulled(served[0], tmp_path / "host", 1).directory_of(1) / MODEL_FILE
    if damage:
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    again = pulled(served[0], tmp_path / "host", 1)
    assert (again.last.sent_bytes > 0) == damage
    assert file.read_bytes() == data


def test_a_flipped_bit_in_what_a_host_has_is_repaired(served: Served, store: WeightStore, tmp_path: Path) -> None:
    write(store, 1)
    second = write(store, 2, change=1e-4)

    async def pull() -> VersionPuller:
        client = Client(served[0].url, token="secret")
        puller = VersionPuller(client, tmp_path / "host", IDENTITY.public_key)
        copy = await puller.pull(1) / MODEL_FILE
        data = bytearray(copy.read_bytes())
        data[1000] ^= 1
        copy.write_bytes(data)
        await puller.pull(2)
        await client.aclose()
        return puller

    puller = asyncio.run(pull())
    assert (puller.directory_of(2) / MODEL_FILE).read_bytes() == second
    assert puller.last.repaired == 1


def test_without_a_base_or_with_one_that_the_run_has_no_more_everything_is_sent(
    served: Served, store: WeightStore, tmp_path: Path
) -> None:
    write(store, 1)

    async def pull() -> VersionPuller:
        client = Client(served[0].url, token="secret")
        puller = VersionPuller(client, tmp_path / "host", IDENTITY.public_key)
        await puller.pull(1)
        write(store, 2, change=1e-4)
        store.remove_before(2)
        await puller.pull(2)
        await client.aclose()
        return puller

    puller = asyncio.run(pull())
    stale, none = puller.last.sent_bytes, pulled(served[0], tmp_path / "other", 2).last.sent_bytes
    assert puller.last.repaired == 0
    assert none >= NUMBERS * 4
    assert none - SHARD_BYTES <= stale <= none, "the second shard had not changed"


def test_what_two_versions_have_alike_outlives_each_of_them(served: Served, store: WeightStore, tmp_path: Path) -> None:
    write(store, 1)
    shutil.copy(store.directory_of(1) / MODEL_FILE, tmp_path / "model")  # as after a step that changed nothing
    pulled(served[0], tmp_path / "first", 0, 1)
    write(store, 2, change=1e-4)
    store.remove_before(2)
    pulled(served[0], tmp_path / "second", 2)
    newcomer = pulled(served[0], tmp_path / "third", 0, 2)
    assert (newcomer.directory_of(0) / MODEL_FILE).read_bytes() == (tmp_path / "model" / MODEL_FILE).read_bytes()


def test_a_version_or_a_shard_that_is_missing_is_refused_and_leaves_nothing(
    served: Served, store: WeightStore, tmp_path: Path
) -> None:
    with pytest.raises(EngineUnavailable, match="version 7 is not here"):
        pulled(served[0], tmp_path / "host", 7)
    write(store, 1)
    pulled(served[0], tmp_path / "host", 1)  # its manifest is known now
    (store.directory_of(1) / MODEL_FILE).unlink()
    served[1]._encoded.clear()
    with pytest.raises(EngineUnavailable, match="can no longer be read"):
        pulled(served[0], tmp_path / "other", 1)
    assert not (tmp_path / "other" / "v1").exists()


def test_bytes_that_changed_after_they_were_signed_are_refused(
    served: Served, store: WeightStore, tmp_path: Path
) -> None:
    write(store, 1)
    pulled(served[0], tmp_path / "host", 1)
    with (store.directory_of(1) / MODEL_FILE).open("r+b") as file:
        file.seek(SHARD_BYTES + 5)
        file.write(b"another")
    served[1]._encoded.clear()
    with pytest.raises(EngineUnavailable, match="expected its hash"):
        pulled(served[0], tmp_path / "other", 1)


def test_a_manifest_of_another_key_or_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    manifest = signed(manifest_of(3, tmp_path), IDENTITY)
    assert manifest.opened(IDENTITY.public_key, 3).version == 3
    with pytest.raises(WireError, match="signature"):
        manifest.opened(Identity.fresh().public_key, 3)
    with pytest.raises(WireError, match="expected that version"):
        manifest.opened(IDENTITY.public_key, 4)


def test_nothing_is_given_without_the_token(served: Served, store: WeightStore, tmp_path: Path) -> None:
    write(store, 1)
    with pytest.raises(EngineUnavailable, match="401"):
        pulled(served[0], tmp_path / "host", 1, token="another")


@given(st.binary(max_size=100), st.binary(max_size=100), st.sampled_from([1, 2, 4, 8]))
def test_any_shard_comes_back_from_any_base(shard: bytes, base: bytes, width: int) -> None:
    wanted = WeightShard(digest_of(shard), len(shard))
    assert decoded(encoded(shard, base, width), base, wanted) == shard


@given(st.binary(min_size=40, max_size=40), st.integers(0, 10_000), st.sampled_from([2, 4]))
def test_a_flipped_bit_on_the_way_is_refused(shard: bytes, at: int, width: int) -> None:
    sent = bytearray(encoded(shard, bytes(40), width))
    at %= 8 * len(sent)
    sent[at // 8] ^= 1 << at % 8
    with suppress(WireError):
        assert decoded(bytes(sent), bytes(40), WeightShard(digest_of(shard), 40)) == shard


@given(st.binary(max_size=60))
def test_whatever_comes_instead_of_a_shard_is_refused(sent: bytes) -> None:
    for start in (b"", b"\0", b"\1", b"\1\4"):
        with pytest.raises(WireError):
            decoded(start + sent, bytes(40), WeightShard("0" * 64, 40))


def test_a_frame_that_states_gigabytes_is_refused_before_anything_is_allocated() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    with pytest.raises(WireError, match="expected at most 40 bytes in a zstd frame, got 1048576"):
        decoded(b"\1\4" + bomb, bytes(40), WeightShard("0" * 64, 40))


def test_the_width_is_that_of_most_numbers(tmp_path: Path) -> None:
    save_file({"a": np.zeros(9, np.float16), "b": np.zeros(4, np.float32)}, tmp_path / "x.safetensors")
    assert width_of(tmp_path / "x.safetensors") == 2


def test_a_pull_that_fails_leaves_nothing_behind(served: Served, store: WeightStore, tmp_path: Path) -> None:
    write(store, 1)

    async def pull() -> None:
        client = Client(served[0].url, token="secret")
        puller = VersionPuller(client, tmp_path / "host", IDENTITY.public_key)
        await puller._manifest(1)
        (store.directory_of(1) / MODEL_FILE).unlink()  # the run has newer weights by now
        with pytest.raises(EngineUnavailable, match="can no longer be read"):
            await puller.pull(1)
        await client.aclose()

    asyncio.run(pull())
    assert not list((tmp_path / "host").iterdir())
