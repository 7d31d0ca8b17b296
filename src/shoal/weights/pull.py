"""Pull of Versions onto the disk of another host than the run's.

Each Version has a folder, as in the run directory. Shards that the newest local Version has are copied; others are
fetched, as a difference or whole. Each is checked by its hash before it is written: if a difference does not fit,
because the local copy is damaged or outdated, the whole shard is fetched.
"""

import asyncio
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import EngineUnavailable, RequestRefused, WireError
from shoal.files import digest_of, sync
from shoal.net.client import Client, words
from shoal.weights.manifest import (
    ROOT,
    SHARD_BYTES,
    Manifest,
    SignedManifest,
    VersionFile,
    WeightShard,
    decoded,
    manifest_of,
)

AT_ONCE = max(4, min(16, os.cpu_count() or 1))
"""Shards fetched at the same time: enough to fill a link and all cores, few enough to use little memory."""


@dataclass(slots=True)
class Pulled:
    """Bytes of one pull."""

    full_bytes: int = 0
    """Bytes of all files."""
    sent_bytes: int = 0
    """Bytes that came over the network."""
    repaired: int = 0
    """Shards that were fetched again, whole."""


class VersionPuller:
    """Versions of one run, kept below a folder; `key` is the public key of the run, which signs them."""

    def __init__(self, client: Client, folder: Path, key: bytes, root: str = ROOT) -> None:
        self.client, self._folder, self._key, self._root = client, folder, key, root
        self._newest: Manifest | None = None
        self._turn = asyncio.Lock()
        self.last = Pulled()
        """Bytes of the latest pull."""

    def directory_of(self, version: int) -> Path:
        """Folder of a Version."""
        return self._folder / f"v{version}"

    async def pull(self, version: int) -> Path:
        """Folder with the files of a Version; fetches missing files.

        Raises `EngineUnavailable` when the run does not answer, no longer has the Version or sends other bytes, and
        when the disk cannot be written: a retry or a newer Version may succeed.
        """
        async with self._turn:
            target = self.directory_of(version)
            if self._newest is not None and self._newest.version == version:
                return target
            try:
                manifest = await self._manifest(version)
                if self._newest is not None or not await asyncio.to_thread(_lies_at, target, manifest):
                    await self._fetch(manifest, target)
            except (WireError, RequestRefused) as error:
                raise EngineUnavailable(f"version {version} cannot be pulled: {error}") from error
            except OSError as error:
                raise EngineUnavailable(f"{target} cannot be written: {error}") from error
            self._newest = manifest
            return target

    async def is_of_run(self) -> bool:
        """Whether the run has the newest Version of this host, with the same bytes.

        Raises `EngineUnavailable` when the run does not answer.
        """
        if self._newest is None:
            return True
        try:
            return await self._manifest(self._newest.version) == self._newest
        except (WireError, RequestRefused):
            return False

    async def _manifest(self, version: int) -> Manifest:
        signed = await self.client.ask("GET", f"{self._root}/versions/{version}", SignedManifest)
        return signed.opened(self._key, version)

    def remove_before(self, version: int) -> None:
        """Removes older Versions except the initial one."""
        for path in self._folder.glob("v*[0-9]"):
            if 0 < int(path.name[1:]) < version:
                shutil.rmtree(path, ignore_errors=True)

    async def _fetch(self, manifest: Manifest, target: Path) -> None:
        unfinished = target.with_name(f"{target.name}.unfinished")
        await asyncio.to_thread(shutil.rmtree, unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        before = {file.name: file.shards for file in self._newest.files} if self._newest else {}
        self.last, working = Pulled(), asyncio.Semaphore(AT_ONCE)

        async def one(file: VersionFile, index: int) -> None:
            async with working:
                data = await self._shard(file, index, before)
                await asyncio.to_thread(_write, unfinished / file.name, index * SHARD_BYTES, data)

        try:
            for file in manifest.files:
                (unfinished / file.name).touch()
            try:
                async with asyncio.TaskGroup() as tasks:
                    for file in manifest.files:
                        for index in range(len(file.shards)):
                            tasks.create_task(one(file, index))
            except* (WireError, OSError, EngineUnavailable) as errors:
                raise _first(errors) from None
            await asyncio.to_thread(_replace, unfinished, target)
        finally:  # removes a failed pull; a successful one has renamed the folder
            shutil.rmtree(unfinished, ignore_errors=True)

    async def _shard(self, file: VersionFile, index: int, before: Mapping[str, tuple[WeightShard, ...]]) -> bytes:
        shard, older = file.shards[index], before.get(file.name, ())
        self.last.full_bytes += shard.size
        base, base_digest = None, ""
        if self._newest is not None and index < len(older):
            base_digest = older[index].digest
            path = self.directory_of(self._newest.version) / file.name
            base = await asyncio.to_thread(_read, path, index * SHARD_BYTES, older[index].size)
        if base is not None and base_digest == shard.digest and digest_of(base) == shard.digest:
            return base
        if base is not None:
            sent = await self._ask(f"{self._root}/shards/{shard.digest}?base={base_digest}")
            try:
                return await asyncio.to_thread(decoded, sent, base, shard)
            except WireError:
                self.last.repaired += 1
        for last in (False, True):
            sent = await self._ask(f"{self._root}/shards/{shard.digest}")
            try:
                return await asyncio.to_thread(decoded, sent, None, shard)
            except WireError:
                if last:
                    raise
                self.last.repaired += 1
        raise AssertionError

    async def _ask(self, path: str) -> bytes:
        status, data = await self.client.status("GET", path)
        self.last.sent_bytes += len(data)
        if status == 200:
            return data
        message = f"{path}: HTTP {status}: {words(data)}"
        raise EngineUnavailable(message)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _lies_at(target: Path, manifest: Manifest) -> bool:
    """Whether an earlier process left a complete Version there."""
    return target.is_dir() and manifest_of(manifest.version, target) == manifest


def _read(path: Path, offset: int, size: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except OSError:
        return None


def _write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def _replace(unfinished: Path, target: Path) -> None:
    """Renames a folder once its files are synced to disk."""
    for path in unfinished.iterdir():
        sync(path)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
