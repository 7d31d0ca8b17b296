"""Routes of a run, and of an engine on another host: nothing without the token, and no path of a caller."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from shoal import wire
from shoal.cluster.engine_role import PullingFront
from shoal.cluster.files import FileShelf, Stretch
from shoal.cluster.registry import RunInfo, run_info
from shoal.config import parse
from shoal.engine.server.http_client import HttpEngine
from shoal.net.client import Client, authorization
from shoal.net.identity import Identity
from shoal.net.run_server import RunServer
from shoal.run.prepare import Prepared
from shoal.run.roles import opened_roles, registry
from shoal.types import Sampling
from shoal.weights.pull import VersionPuller
from shoal.weights.serving import VersionServer
from shoal.weights.store import WeightStore

TOKEN, NOWHERE, IDENTITY = "secret", "http://127.0.0.1:9", Identity.fresh()


async def asked(app: Starlette, method: str, path: str, token: str, body: object = None) -> tuple[int, str]:
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    given: dict[str, Any] = {"content" if isinstance(body, bytes) else "json": body}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        headers = {**authorization(token), "Content-Type": "application/json"}
        reply = await http.request(method, path, headers=headers, **given)
    return reply.status_code, reply.text


@contextmanager
def run_of(folder: Path, shelf: FileShelf) -> Iterator[Starlette]:
    """All routes of a run; within an event loop."""
    server = RunServer(shelf.routes, token=TOKEN)
    info = RunInfo(IDENTITY.public_key, "{}", "{}", Sampling(1), 8)
    with registry(server, info, VersionServer(WeightStore(folder), folder, IDENTITY), lambda name, state: None):
        yield server.app


def engine_of(folder: Path) -> Starlette:
    """All routes of an engine's host."""
    puller = VersionPuller(Client(NOWHERE), folder, IDENTITY.public_key)
    return PullingFront(HttpEngine(NOWHERE), puller).app(TOKEN)


def requests(app: Starlette) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        if isinstance(route, Route):
            path = re.sub("{[^}]*}", "1", route.path)
            yield from ((method, path) for method in sorted(route.methods or ()))


async def test_no_route_of_a_role_answers_without_its_token(tmp_path: Path) -> None:
    with run_of(tmp_path, FileShelf()) as run:
        for app in (run, engine_of(tmp_path)):
            found = list(requests(app))
            assert len(found) >= 8
            for method, path in found:
                for wrong in ("", "another", TOKEN[:-1]):
                    assert (await asked(app, method, path, wrong))[0] == 401, (method, path)


async def test_a_run_tells_its_roles_how_its_engines_are_to_answer(tmp_path: Path) -> None:
    tree = {"run_dir": str(tmp_path), "tasks": [{"name": "gcd"}], "cluster": {"listen": "127.0.0.1:0"}}
    nothing: Any = SimpleNamespace(stop_token_ids=(9,))
    prepared = Prepared(parse(tree), tmp_path, nothing, nothing, 64, 8, token=TOKEN)
    async with opened_roles(prepared, WeightStore(tmp_path / "weights"), lambda name, **details: None) as server:
        assert server is not None
        async with aclosing(Client(server.url, token=TOKEN)) as client:
            info = await run_info(client)
    assert (info.max_model_len, info.sampling) == (64, prepared.sampling)


def test_an_engine_of_another_host_loads_no_path_of_its_caller(tmp_path: Path) -> None:
    body = {"version": 1, "path": str(tmp_path)}
    status, said = asyncio.run(asked(engine_of(tmp_path), "POST", "/update_weights", TOKEN, body))
    assert (status, "path: expected none, this engine pulls its versions" in said) == (400, True)


@pytest.mark.parametrize("name", ["..", "%2e%2e", "a%2fb", "..%2fsecret", ".hidden", "a%00"])
def test_files_of_a_run_are_read_and_written_in_the_folder_of_a_ticket_only(tmp_path: Path, name: str) -> None:
    async def ask() -> None:
        shelf, folder = FileShelf(), tmp_path / "shelf"
        (folder / "a").mkdir(parents=True)
        (tmp_path / "secret").write_text("secret")
        app = RunServer(shelf.routes, token=TOKEN).app
        ticket = shelf.ticket(folder)
        with shelf.opened(folder):
            for read in ("", "/read"):
                status, said = await asked(app, "POST", f"/v1/files/{ticket}/{name}{read}", TOKEN, [[0, 1]])
                assert status in (400, 404, 405), said
                assert "secret" not in said
            for offset, data in ((3, b"lo"), (0, b"hel")):  # ranks write in any order
                sent = wire.encode([Stretch(offset, data)])
                assert (await asked(app, "POST", f"/v1/files/{ticket}/own", TOKEN, sent))[0] == 200
            assert (folder / "own").read_bytes() == b"hello"
            status, said = await asked(app, "POST", f"/v1/files/{ticket}/own", TOKEN, wire.encode([(-1, b"no")]))
            assert (status, "own: expected a list" in said) == (400, True), said
            read = f"/v1/files/{ticket}/own/read"
            status, said = await asked(app, "POST", read, TOKEN, b"[[3,2],[0,1]]")
            assert (status, "lo" in said, "h" in said, "el" in said) == (200, True, True, False)
            assert shelf.read_bytes == 3
            for wrong in (b"[[-1,2]]", b"[[0,99999999]]", b"{}"):
                assert (await asked(app, "POST", read, TOKEN, wrong))[0] == 400
        assert (await asked(app, "POST", read, TOKEN, b"[[0,1]]"))[0] == 404

    asyncio.run(ask())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "shelf"]
