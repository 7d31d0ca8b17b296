"""What every server has before its routes: who may ask, how much, how slowly, and from how many connections."""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import shoal
from shoal.errors import EngineUnavailable, RequestRefused, TaskError
from shoal.net.client import Client
from shoal.net.server import HANDLERS, body, decoded, guarded, serving
from shoal.net.server import json as answer
from until import until

MOST_BYTES = 1000


class Add(msgspec.Struct):
    a: int
    b: int = 0


async def add(http: Request) -> Response:
    asked = decoded(await body(http, MOST_BYTES, timeout_s=http.app.state.timeout_s), Add)
    return answer(asked.a + asked.b)


async def who(http: Request) -> Response:
    assert http.client is not None
    return answer(http.client.host)


async def fails(http: Request) -> Response:
    kinds = {kind.__name__: kind for kind in (TaskError, RequestRefused, EngineUnavailable)}
    raise kinds[http.path_params["kind"]]("because")


@contextlib.asynccontextmanager
async def served(*, token: str = "", per_address: int = 64, timeout_s: float = 60.0) -> AsyncIterator[int]:
    """The port of a server whose headers and bodies have so many seconds."""
    routes = [Route("/add", add, methods=["POST"]), Route("/who", who), Route("/fails/{kind}", fails)]
    guard = Middleware(guarded, token=token, free=("/who",))
    app = Starlette(routes=routes, middleware=[guard], exception_handlers=HANDLERS)
    app.state.timeout_s = timeout_s
    async with serving(app, grace_s=1, per_address=per_address, headers_timeout_s=timeout_s) as url:
        yield int(url.rpartition(":")[2])


async def sent(port: int, head: str, data: bytes = b"", *, whole: bool = True) -> tuple[int, object]:
    """Status and JSON of what a server says before it closes; status 0 when it says nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    length = f"content-length: {len(data)}\r\n" if data else ""
    end = f"\r\n{length}connection: close\r\n\r\n" if whole else ""
    writer.write(head.replace("\n", "\r\n").encode() + end.encode() + data)
    try:
        async with asyncio.timeout(60):
            said = await reader.read()
    except ConnectionResetError:
        said = b""
    writer.close()
    top, _, rest = said.partition(b"\r\n\r\n")
    return (int(top.split()[1]), json.loads(rest) if rest else None) if said else (0, None)


async def is_answered(port: int) -> bool:
    return (await sent(port, "GET /who HTTP/1.1\nhost: localhost"))[0] == 200


POST = "POST /add HTTP/1.1\nhost: localhost\ncontent-type: application/json"


@pytest.mark.parametrize(
    ("head", "data", "status"),
    [
        (POST, b'{"a": 1, "b": 2}', 200),
        (POST.replace("json", "json; charset=utf-8"), b'{"a": 1}', 200),
        (POST.replace("localhost", "127.0.0.1:80"), b'{"a": 1}', 200),
        (POST.replace("localhost", "[::1]:80"), b'{"a": 1}', 200),
        (POST.replace("localhost", "evil.example:80"), b'{"a": 1}', 421),
        (POST.replace("localhost", "localhost.evil.example"), b'{"a": 1}', 421),
        (POST.replace("application/json", "text/plain"), b'{"a": 1}', 415),
        (POST.replace("\ncontent-type: application/json", ""), b'{"a": 1}', 415),
        (POST, b'{"a": "x"}', 400),
        (POST, b"", 400),
        (POST, b'{"a": ' + b"[" * 900, 400),
        (POST, b'"' + b"x" * MOST_BYTES, 413),
        ("GET /who HTTP/1.1\nhost: evil.example", b"", 421),
        ("GET /who HTTP/1.1\nhost: localhost\nx-forwarded-for: 10.0.0.1", b"", 200),
        ("GET /nowhere HTTP/1.1\nhost: localhost", b"", 404),
        ("GET /add HTTP/1.1\nhost: localhost", b"", 405),
        ("GET /fails/TaskError HTTP/1.1\nhost: localhost", b"", 409),
        ("GET /fails/RequestRefused HTTP/1.1\nhost: localhost", b"", 400),
        ("GET /fails/EngineUnavailable HTTP/1.1\nhost: localhost", b"", 503),
    ],
)
def test_a_request_has_the_status_that_says_what_is_wrong_with_it(head: str, data: bytes, status: int) -> None:
    async def ask() -> None:
        async with served() as port:
            got, said = await sent(port, head, data)
            assert got == status, said
            if status != 200:
                assert isinstance(said, dict)
                assert said["error"]["code"] == status
            if "forwarded" in head:
                assert said == "127.0.0.1"  # whom anybody says that he is does not count

    asyncio.run(ask())


async def test_with_a_token_only_who_sends_it_is_answered_by_whatever_name() -> None:
    async with served(token="secret") as port:
        for given, status in (("", 401), ("Bearer wrong", 401), ("secret", 401), ("Bearer secret", 200)):
            assert (await sent(port, f"{POST}\nauthorization: {given}", b'{"a": 1}'))[0] == status
        named = POST.replace("localhost", "trainer.example")
        assert (await sent(port, f"{named}\nauthorization: Bearer secret", b'{"a": 1}'))[0] == 200
        assert (await sent(port, named, b'{"a": 1}'))[0] == 421
        assert (await sent(port, "GET /who HTTP/1.1\nhost: localhost"))[0] == 200


@pytest.mark.parametrize(
    "half",
    ["", "\n\n", "POST /add HT", f"{POST}\nx-slow: 1", "GET /who HTTP/1.1\nhost: localhost\n" + "x-many: 1\n" * 20_000],
    ids=["nothing", "empty lines", "half a line", "no end", "endless headers"],
)
async def test_half_a_request_is_not_waited_for(half: str) -> None:
    async with served(timeout_s=0.2) as port:
        assert await sent(port, half, whole=False) == (0, None)


async def test_half_a_second_request_is_not_waited_for_either() -> None:
    async with served(timeout_s=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /who HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b'"127.0.0.1"')
        writer.write(b"GET /who HTTP/1.1\r\nhost: ")
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(60):
                assert await reader.read() == b""
        writer.close()


async def test_half_a_body_is_refused_in_time() -> None:
    async with served(timeout_s=0.2) as port:
        head = POST.replace("\n", "\r\n") + "\r\nconnection: close\r\ncontent-length: 100\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b'{"a"')
        async with asyncio.timeout(60):
            assert (await reader.readline()).split()[1] == b"408"
        writer.close()


def test_no_server_is_made_without_these_limits() -> None:
    """Whatever uvicorn serves needs a `uvicorn.Config`."""
    source = Path(shoal.__file__).parent
    others = r"uvicorn\.(Config|run|main)\b|from uvicorn(\.config|\.main)? import|http\.server|web\.run_app"
    found = {str(path.relative_to(source)) for path in source.rglob("*.py") if re.search(others, path.read_text())}
    assert found == {"net/server.py"}


def test_three_quarters_of_as_many_descriptors_as_the_system_allows_are_for_connections() -> None:
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
from shoal.net.server import uvicorn_config
print(uvicorn_config(None).http.most, resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said == "192 (256, 256)\n"


async def test_one_address_holds_so_many_connections_and_no_more() -> None:
    async with served(per_address=2) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert (await sent(port, "GET /who HTTP/1.1\nhost: localhost"))[0] == 503
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        await until(lambda: is_answered(port))


@pytest.mark.parametrize(("given", "status"), [("secret\n", 200), (" secret", 200), ("other\n", 401)])
async def test_a_token_is_the_same_with_blanks_around_it(given: str, status: int) -> None:
    async with served(token="secret\r\n") as port:
        client = Client(f"http://127.0.0.1:{port}", token=given)
        assert (await client.status("POST", "/add", Add(1)))[0] == status
        await client.aclose()


async def test_a_blank_token_lets_nobody_in() -> None:
    async with served(token=" \n") as port:
        for given in ("Bearer", "Bearer ", "Bearer  "):
            head = f"{POST}\nauthorization: {given}"
            assert (await sent(port, head))[0] == 401
