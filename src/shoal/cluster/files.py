"""Files that pass between the run and its roles: a ticket stands for one folder, and no request names a path.

GET /v1/files/TICKET                     names and sizes
GET /v1/files/TICKET/NAME?offset=N       a part of a file
POST /v1/files/TICKET/NAME?offset=N      a part of a file, written there
"""

import asyncio
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.errors import TrainerError, WireError
from shoal.net.client import Client, words
from shoal.net.server import Refused, body, json
from shoal.weights.manifest import digest_of

PART_BYTES = 32 << 20
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class FileShelf:
    """Folders of the run that roles may read and fill, by ticket."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}
        self.routes = [
            Route("/v1/files/{ticket}", self._list),
            Route("/v1/files/{ticket}/{name}", self._read),
            Route("/v1/files/{ticket}/{name}", self._write, methods=["POST"]),
        ]

    @contextmanager
    def ticket(self, folder: Path) -> Iterator[str]:
        """Ticket of a folder, for as long as the block lasts."""
        ticket = secrets.token_urlsafe(16)
        self._folders[ticket] = folder
        try:
            yield ticket
        finally:
            del self._folders[ticket]

    def _folder(self, http: Request) -> Path:
        folder = self._folders.get(http.path_params["ticket"])
        if folder is None:
            raise Refused(404, "ticket: expected one of a request under way")
        return folder

    def _place(self, http: Request) -> tuple[Path, int]:
        name, offset = http.path_params["name"], http.query_params.get("offset", "0")
        if not NAME.fullmatch(name) or not offset.isdecimal():
            raise Refused(400, f"expected the name of a file and an offset, got {name[:80]!r} and {offset[:20]!r}")
        return self._folder(http) / name, int(offset)

    async def _list(self, http: Request) -> Response:
        folder = self._folder(http)
        return json({path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()})

    async def _read(self, http: Request) -> Response:
        path, offset = self._place(http)
        try:
            return Response(await asyncio.to_thread(_part, path, offset), media_type="application/octet-stream")
        except OSError as error:
            raise Refused(404, f"{path.name}: {error.strerror}") from error

    async def _write(self, http: Request) -> Response:
        path, offset = self._place(http)
        data = await body(http, PART_BYTES)
        try:
            await asyncio.to_thread(_write, path, offset, data)
        except OSError as error:
            raise Refused(507, f"{path.name}: {error.strerror}") from error
        return json({"digest": digest_of(data)})


async def send_files(client: Client, ticket: str, folder: Path) -> None:
    """Sends the files of a folder to the run. Raises `TrainerError` or `EngineUnavailable`."""
    sizes = await asyncio.to_thread(lambda: {path: path.stat().st_size for path in sorted(folder.iterdir())})
    for path, size in sizes.items():
        for offset in range(0, max(size, 1), PART_BYTES):
            data = await asyncio.to_thread(_part, path, offset)
            status, answer = await client.status("POST", f"/v1/files/{ticket}/{path.name}?offset={offset}", data)
            if status != 200:
                raise TrainerError(f"the run does not take {path.name}: HTTP {status}: {words(answer)}")
            if msgspec.json.decode(answer, type=dict[str, str])["digest"] != digest_of(data):
                raise WireError(f"{path.name}: expected its hash, got other bytes at the run")


async def fetch_files(client: Client, ticket: str, folder: Path) -> None:
    """Fetches the files behind a ticket into a folder. Raises `TrainerError` or `EngineUnavailable`."""
    for name, size in (await client.ask("GET", f"/v1/files/{ticket}", dict[str, int])).items():
        if not NAME.fullmatch(name):
            raise WireError(f"expected the name of a file, got {name[:80]!r}")
        (folder / name).touch()
        for offset in range(0, size, PART_BYTES):
            status, data = await client.status("GET", f"/v1/files/{ticket}/{name}?offset={offset}")
            if status != 200:
                raise TrainerError(f"the run does not give {name}: HTTP {status}: {words(data)}")
            await asyncio.to_thread(_write, folder / name, offset, data)


def _part(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(PART_BYTES)


def _write(path: Path, offset: int, data: bytes) -> None:
    path.touch()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
