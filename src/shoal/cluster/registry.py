"""The registry of a run: processes of any host that join it in a role, and leave it.

    GET /v1/run      what a role needs to know of the run
    GET /v1/roles    the roles that are there
    GET /v1/join     the WebSocket of a role: its lease

A role says what it can do and where it listens. It belongs to the run for as long as its connection answers pings. The
room that can use it has added a `RoleHandler` for it, on the event loop of the run.
"""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from shoal.cluster.files import FileShelf
from shoal.errors import ShoalError
from shoal.net.run_server import RunServer, send
from shoal.net.server import json
from shoal.types import Sampling

PROTOCOL = 1
PROCESS = secrets.token_hex(8)
"""Name of this process, which no other has."""
JOIN = "/v1/join"
Url: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/@]{1,255}$")]
Address: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[^\s/@]{1,255}$")]
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Secret: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]


class RunInfo(msgspec.Struct, frozen=True):
    """Description of a run for its roles."""

    key: bytes
    """Public key that signs the manifests, and by which a role tells this run from another."""
    model_json: str
    """Section `config.ModelConfig`; its `path` is not used."""
    engine_json: str
    sampling: Sampling
    max_model_len: int | None
    """None for the model's own."""
    adapters: bool = False
    """Whether requests name adapters, which only Shoal's own engine serves by name."""
    process: str = PROCESS
    """Process of the run: one that goes on from an older copy may have other Versions under the same numbers."""
    protocol: int = PROTOCOL


class EngineRole(msgspec.Struct, frozen=True, tag="engine", forbid_unknown_fields=True):
    """An engine that answers at `url`; `token` is its own."""

    url: Url
    token: Secret
    protocol: int = PROTOCOL


class RewardsRole(msgspec.Struct, frozen=True, tag="rewards", forbid_unknown_fields=True):
    """A scorer that answers at `url`; `token` is its own."""

    url: Url
    token: Secret
    protocol: int = PROTOCOL


class RankRole(msgspec.Struct, frozen=True, tag="trainer", forbid_unknown_fields=True):
    """A rank of the trainer; others reach it at `address`, where `port` is free in case that it is the first."""

    address: Address
    port: Port
    rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number that a launcher gave it; the run numbers ranks without one."""
    ranks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of all ranks that a launcher started."""
    protocol: int = PROTOCOL


Role: TypeAlias = EngineRole | RewardsRole | RankRole


class Admitted(msgspec.Struct, frozen=True, tag="joined"):
    """Answer to a role that the run uses from now on, under this name."""

    name: str


class NotJoined(msgspec.Struct, frozen=True, tag="refused"):
    """Answer to a role that the run cannot use; `again` says that it may ask again."""

    reason: str
    again: bool


class Gathered(msgspec.Struct, frozen=True, tag="gathered"):
    """Word to a rank that all are there: it starts, and binary messages with requests follow."""

    rank: int
    ranks: int
    per_host: int | None
    master: str
    """HOST:PORT of the first rank."""


class RoleLine:
    """The connection of a role, used on the event loop of the run."""

    def __init__(self, server: RunServer, socket: WebSocket) -> None:
        self._server, self._socket = server, socket
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()
        """Messages of the role."""

    async def send(self, data: bytes) -> None:
        """Sends a binary message; one to a role that has left is lost."""
        await self._server.done(self._sent(data))

    async def _sent(self, data: bytes) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await self._socket.send_bytes(data)

    async def close(self) -> None:
        """Ends the lease."""
        await self._server.done(self._closed())

    async def _closed(self) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await self._socket.close()


class RoleHandler(Protocol):
    """User of one kind of roles. Both methods run on the event loop of the run."""

    async def join(self, name: str, role: Role, line: RoleLine) -> None:
        """Returns once the run uses the role. Raises a `ShoalError`."""

    async def leave(self, name: str) -> None:
        """Returns once the run uses the role no more."""


class NotWanted(ShoalError):
    """A role that the run will not use, however often it asks."""


class Roles:
    """The roles of a run. Its routes are served by a `RunServer`; handlers come and go on another event loop."""

    def __init__(
        self, server: RunServer, info: RunInfo, shelf: FileShelf, on_event: Callable[[str, str], None]
    ) -> None:
        """`on_event` gets the name of a role and what became of it, on the event loop of the run."""
        self.shelf = shelf
        """Folders that roles read and fill."""
        self._server, self._info, self._on_event = server, info, on_event
        self._main = asyncio.get_running_loop()
        self._handlers: dict[str, RoleHandler] = {}
        self._present: dict[str, float] = {}
        self._numbers: Counter[str] = Counter()
        server.add([Route("/v1/run", self._run), Route("/v1/roles", self._list), WebSocketRoute(JOIN, self._join)])

    def open(self, kind: type[Role], handler: RoleHandler) -> None:
        """Lets roles of a kind in."""
        self._handlers[str(kind.__struct_config__.tag)] = handler

    def close(self, kind: type[Role]) -> None:
        """Lets no more roles of a kind in; leaves are no longer told."""
        self._handlers.pop(str(kind.__struct_config__.tag), None)

    def shut(self) -> None:
        """Lets nobody in any more: the event loop of the run ends."""
        self._handlers.clear()
        self._on_event = lambda name, state: None

    @property
    def url(self) -> str:
        """Where roles join."""
        return self._server.url

    async def _run(self, _: Request) -> Response:
        return json(self._info)

    async def _list(self, _: Request) -> Response:
        now_s = time.monotonic()
        return json({name: {"seconds": now_s - since_s} for name, since_s in sorted(self._present.items())})

    @asynccontextmanager
    async def _role(self, role: Role, socket: WebSocket) -> AsyncIterator[Callable[[bytes], None]]:
        """One role for as long as it is connected."""
        kind, line = str(role.__struct_config__.tag), RoleLine(self._server, socket)
        if role.protocol != PROTOCOL:
            raise NotWanted(f"protocol: expected {PROTOCOL}, got {role.protocol}; install the run's version")
        handler = self._handlers.get(kind)
        if handler is None:
            raise ShoalError(f"the run takes no role {kind!r} now")
        self._numbers[kind] += 1
        name = f"{kind}-joined-{self._numbers[kind]}"
        await self._on_main(handler.join(name, role, line))
        await send(socket, Admitted(name))
        self._present[name] = time.monotonic()
        self._told(name, "joined")
        try:
            yield lambda message: self._later(line.messages.put_nowait, message)
        finally:
            del self._present[name]
            self._told(name, "left")
            if handler in self._handlers.values():
                with contextlib.suppress(ShoalError):  # there is nothing left to leave
                    await self._on_main(handler.leave(name))

    async def _join(self, socket: WebSocket) -> None:
        await self._server.lease(socket, Role, self._role, _refused)  # type: ignore[arg-type]

    def _told(self, name: str, state: str) -> None:
        self._later(self._on_event, name, state)

    def _later(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop of the run has ended
            self._main.call_soon_threadsafe(function, *arguments)

    async def _on_main(self, doing: Coroutine[Any, Any, None]) -> None:
        """Awaits something on the event loop of the run. Raises `ShoalError` when that ends meanwhile."""
        try:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(doing, self._main))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise ShoalError("the run ends, or goes on from its log") from None


def _refused(error: Exception) -> NotJoined:
    return NotJoined(str(error), again=not isinstance(error, NotWanted))
