"""Versions over HTTP, for hosts that share no directory with the run.

    GET /v1/versions/N              the signed manifest of a Version; 0 is the initial model
    GET /v1/shards/DIGEST?base=D    a shard, as a difference to the client's shard D if that is smaller

A Version is hashed once, when it is sealed; other files on the first request. Other numbered folders than Versions are
served below another `root`.
"""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.net.identity import Identity
from shoal.net.server import Refused, json
from shoal.weights.manifest import KNOWN, ROOT, SHARD_BYTES, Manifest, SignedManifest, encoded, manifest_of, signed

KEPT_MANIFESTS = 256
"""Newest manifests kept, in addition to the initial model's."""
KEPT_SHARDS = 64
"""Encoded shards kept in a cache: engines request the same ones at about the same time."""
AT_ONCE = max(4, min(16, os.cpu_count() or 1))
"""Shards read and compressed at the same time."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of a shard."""

    file: Path
    offset: int
    size: int
    width: int

    def read(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


class Versions(Protocol):
    """Versions on disk, by number."""

    def directory_of(self, version: int) -> Path:
        """Folder of a Version. May raise `FileNotFoundError`."""


class VersionServer:
    """Routes of a run's Versions. All calls come from the event loop that serves them."""

    def __init__(self, store: Versions, model_dir: Path, identity: Identity, root: str = ROOT) -> None:
        self._store, self._model_dir, self._identity = store, model_dir, identity
        self._manifests: dict[int, asyncio.Task[SignedManifest]] = {}
        self._places: dict[str, list[_Place]] = {}
        """Places of each shard: Versions that share a shard are removed independently."""
        self._encoded: OrderedDict[tuple[str, str], asyncio.Task[bytes]] = OrderedDict()
        self._working = asyncio.Semaphore(AT_ONCE)
        self.sent_bytes = 0
        """Bytes of all shards sent."""
        self.routes = [
            Route(root + "/versions/{version:int}", self._manifest),
            Route(root + "/shards/{digest}", self._shard),
        ]

    async def _manifest(self, http: Request) -> Response:
        version = http.path_params["version"]
        known = self._manifests.get(version)
        if known is None or (known.done() and known.exception() is not None):
            known = self._manifests[version] = asyncio.create_task(self._signed(version))
            for older in [one for one in self._manifests if one][:-KEPT_MANIFESTS]:
                del self._manifests[older]
        try:
            return json(await asyncio.shield(known))
        except FileNotFoundError:
            raise Refused(404, f"version {version} is not here; ask for the newest") from None

    async def _signed(self, version: int) -> SignedManifest:
        directory = self._store.directory_of(version) if version else self._model_dir
        manifest = await asyncio.to_thread(manifest_of, version, directory, KNOWN)
        for digest, places in list(self._places.items()):
            self._places[digest] = kept = [place for place in places if place.file.exists()]
            if not kept:
                del self._places[digest]
        for digest, place in _places(manifest, directory):
            self._places.setdefault(digest, []).append(place)
        return signed(manifest, self._identity)

    async def _shard(self, http: Request) -> Response:
        digest, base = http.path_params["digest"], http.query_params.get("base", "")
        if digest not in self._places:
            raise Refused(404, f"shard {digest[:64]} is not here; ask for the manifest of the newest version")
        key = (digest, base if base in self._places else "")
        task = self._encoded.get(key)
        if task is None:
            places, bases = (list(self._places.get(one, ())) for one in key)
            task = self._encoded[key] = asyncio.create_task(self._encode(places, bases))
        self._encoded.move_to_end(key)
        while len(self._encoded) > KEPT_SHARDS:
            self._encoded.popitem(last=False)
        try:
            data = await asyncio.shield(task)
        except OSError as error:
            self._encoded.pop(key, None)
            raise Refused(404, f"shard {digest[:64]} can no longer be read: {error.strerror}") from error
        self.sent_bytes += len(data)
        return Response(data, media_type="application/octet-stream")

    async def _encode(self, places: Sequence[_Place], bases: Sequence[_Place]) -> bytes:
        async with self._working:
            return await asyncio.to_thread(_read_and_encode, places, bases)


def _read_and_encode(places: Sequence[_Place], bases: Sequence[_Place]) -> bytes:
    try:
        older = _read(bases) if bases else None
    except OSError:  # removed since: the whole shard is sent
        older = None
    return encoded(_read(places), older, places[0].width)


def _read(places: Sequence[_Place]) -> bytes:
    """Bytes of a shard from the first of its places that is still there. Raises `OSError` when none is."""
    for place in places[:-1]:
        with suppress(OSError):
            return place.read()
    return places[-1].read()


def _places(manifest: Manifest, directory: Path) -> Iterator[tuple[str, _Place]]:
    for file in manifest.files:
        for index, shard in enumerate(file.shards):
            yield shard.digest, _Place(directory / file.name, index * SHARD_BYTES, shard.size, file.width)
