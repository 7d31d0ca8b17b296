"""An HTTP server that answers what a test tells it to: for servers that fail, lie or are not what they should be."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field


@dataclass
class Stub:
    """Answers of one server; change them at any time."""

    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Status and body by path; others get `otherwise`."""
    otherwise: tuple[int, bytes] = (404, b"404 page not found")
    asked: list[str] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, after which the connection is closed."""
        with closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lengths = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length:")]
            await reader.readexactly(int(lengths[0]) if lengths else 0)
            path = head.split()[1]
            self.asked.append(path)
            status, body = self.answers.get(path, self.otherwise)
            writer.write(f"HTTP/1.1 {status} .\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode())
            writer.write(body)
            await writer.drain()


@asynccontextmanager
async def stubbed(stub: Stub, port: int = 0) -> AsyncIterator[str]:
    """The URL of a server that answers so; 0 picks a free port."""
    server = await asyncio.start_server(stub.answer, "127.0.0.1", port)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
