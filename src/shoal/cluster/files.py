"""Files that pass between the run and its roles: a ticket stands for one folder, and no request names a path.

GET /v1/files/TICKET                     names and sizes
POST /v1/files/TICKET/NAME/read          stretches of a file, by their offsets and sizes
POST /v1/files/TICKET/NAME               stretches of a file, written there

Several roles may write stretches of the same file, as ranks do that have a part of a Version each.
"""

import asyncio
import hashlib
import re
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal import wire
from shoal.errors import TrainerError, WireError
from shoal.files import HEAD_BYTES, digest_of
from shoal.net.client import Client, words
from shoal.net.server import Refused, body, decoded, json
from shoal.trainer.messages import RANGES

PART_BYTES = 32 << 20
OVERHEAD_BYTES = 1 << 20
"""Maximum bytes of a request without its ranges."""
FEW_BYTES = 64
"""Fixed overhead per range, in bytes."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class FileShelf:
    """Folders of the run that roles may read and fill, by ticket."""

    def __init__(self) -> None:
        self._folders, self._key = defaultdict[str, list[Path]](list), secrets.token_bytes(32)
        self.read_bytes = 0
        """Bytes of files that roles have read."""
        self.routes = [
            Route("/v1/files/{ticket}", self._list),
            Route("/v1/files/{ticket}/{name}/read", self._read, methods=["POST"]),
            Route("/v1/files/{ticket}/{name}", self._write, methods=["POST"]),
        ]

    def ticket(self, folder: Path) -> str:
        """Ticket of a folder, which cannot be guessed."""
        return hashlib.blake2b(str(folder).encode(), key=self._key, digest_size=16).hexdigest()

    @contextmanager
    def opened(self, folder: Path | None) -> Iterator[None]:
        """Lets roles use the ticket of a folder within the block."""
        if folder is not None:
            self._folders[self.ticket(folder)] += [folder]
        try:
            yield
        finally:
            if folder is not None:
                self._folders[self.ticket(folder)].pop()

    def _folder(self, http: Request) -> Path:
        if not (found := self._folders.get(http.path_params["ticket"])):
            raise Refused(404, "ticket: expected one of a request under way")
        return found[0]

    def _file(self, http: Request) -> Path:
        name: str = http.path_params["name"]
        if not NAME.fullmatch(name):
            raise Refused(400, f"expected the name of a file, got {name[:80]!r}")
        return self._folder(http) / name

    async def _list(self, http: Request) -> Response:
        folder = self._folder(http)
        return json({path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()})

    async def _read(self, http: Request) -> Response:
        path, asked = self._file(http), decoded(await body(http, OVERHEAD_BYTES), list[tuple[Offset, Offset]])
        if (size := sum(size for _, size in asked)) > PART_BYTES:
            raise Refused(400, f"expected stretches of at most {PART_BYTES} bytes, got {size}")
        try:
            data = await asyncio.to_thread(_encoded, path, asked)
        except OSError as error:
            raise Refused(404, f"{path.name}: {error.strerror}") from error
        self.read_bytes += size
        return Response(data, media_type="application/octet-stream")

    async def _write(self, http: Request) -> Response:
        path, data = self._file(http), await body(http, PART_BYTES + OVERHEAD_BYTES)
        try:
            return json({"digest": await asyncio.to_thread(_written, path, data)})
        except WireError as error:
            raise Refused(400, f"{path.name}: {error}") from error
        except OSError as error:
            raise Refused(507, f"{path.name}: {error.strerror}") from error


Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a file from an offset on."""

    offset: Offset
    data: bytes


async def send_files(client: Client, ticket: str, folder: Path) -> None:
    """Sends the files of a folder to the run; of a file with listed ranges, only those.

    Raises `TrainerError` or `EngineUnavailable`.
    """
    for path in sorted(await asyncio.to_thread(lambda: [*folder.iterdir()])):
        if path.suffix == RANGES:
            continue
        for part in _parts(await asyncio.to_thread(_ranges, path)):
            data = await asyncio.to_thread(_encoded, path, part)
            status, answer = await client.status("POST", f"/v1/files/{ticket}/{path.name}", data)
            if status != 200:
                raise TrainerError(f"the run does not take {path.name}: HTTP {status}: {words(answer)}")
            if msgspec.json.decode(answer, type=dict[str, str])["digest"] != await asyncio.to_thread(digest_of, data):
                raise WireError(f"{path.name}: expected its hash, got other bytes at the run")


def _ranges(path: Path) -> list[tuple[int, int]]:
    """Offset and size of each stretch of a file that is to be sent."""
    sidecar = path.with_name(path.name + RANGES)
    if sidecar.exists():
        return msgspec.json.decode(sidecar.read_bytes(), type=list[tuple[int, int]])
    return [(0, path.stat().st_size)]


def _parts(ranges: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Stretches in lists that fit into a request each; a file without bytes has a list, too."""
    part: list[tuple[int, int]] = []
    held = 0
    for offset, size in ranges:
        for begin in range(0, max(size, 1), PART_BYTES):
            one = min(size - begin, PART_BYTES)
            if part and held + one > PART_BYTES:
                yield part
                part, held = [], 0
            part.append((offset + begin, one))
            held += one + FEW_BYTES
    if part:
        yield part


def _encoded(path: Path, ranges: Sequence[tuple[int, int]]) -> bytes:
    found = []
    with path.open("rb") as file:
        for offset, size in ranges:
            file.seek(offset)
            found.append(Stretch(offset, file.read(size)))
    return wire.encode(found)


async def fetch_heads(client: Client, ticket: str, folder: Path) -> None:
    """Makes the files behind a ticket in a folder, of their sizes, with only the header of safetensors in each.

    Raises `TrainerError` or `EngineUnavailable`.
    """
    for name, size in (await client.ask("GET", f"/v1/files/{ticket}", dict[str, int])).items():
        if not NAME.fullmatch(name):
            raise WireError(f"expected the name of a file, got {name[:80]!r}")
        path = folder / name
        await asyncio.to_thread(_make, path, size)
        if name.endswith(".safetensors"):
            await fetch_ranges(client, ticket, path, [(0, min(size, HEAD_BYTES))])
            header = int.from_bytes(await asyncio.to_thread(_head, path), "little")
            await fetch_ranges(client, ticket, path, [(HEAD_BYTES, min(header, size))])


async def fetch_ranges(client: Client, ticket: str, path: Path, ranges: Sequence[tuple[int, int]]) -> None:
    """Fetches ranges of a file, by offset and size, into their places. Raises `TrainerError` or `EngineUnavailable`."""
    for part in _parts(ranges):
        asked = msgspec.json.encode(part)
        status, data = await client.status("POST", f"/v1/files/{ticket}/{path.name}/read", asked)
        if status != 200:
            raise TrainerError(f"the run does not give {path.name}: HTTP {status}: {words(data)}")
        await asyncio.to_thread(_written, path, data)


def _make(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def _written(path: Path, data: bytes) -> str:
    """Writes encoded stretches into a file; returns the digest of what came. Raises `WireError` and `OSError`."""
    _write(path, wire.decode(data, list[Stretch], len(data)))
    return digest_of(data)


def _write(path: Path, stretches: Sequence[Stretch]) -> None:
    path.touch()
    with path.open("r+b") as file:
        for one in stretches:
            file.seek(one.offset)
            file.write(one.data)
