"""Listening sockets of servers: on loopback, unless the user chooses another address."""

import errno
import ipaddress
import os
import re
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import TypedDict
from urllib.parse import urlsplit

import psutil

from shoal.errors import ConfigError
from shoal.files import cache_directory

CERTIFICATE_VARIABLE, KEY_VARIABLE = "SHOAL_TLS_CERT", "SHOAL_TLS_KEY"
"""Names of the environment variables with the PEM files of this host's certificate and its key."""
UNASKED_PORTS = range(20_000, 30_000)
"""Ports below those of Kubernetes' nodes, and below those that systems give to programs without a choice."""


class TLSFiles(TypedDict, total=False):
    """Files of a certificate and its key as uvicorn takes them; empty serves without TLS."""

    ssl_certfile: str
    ssl_keyfile: str


def tls_files() -> TLSFiles:
    """Certificate pair of this host for the routes of a run and its roles. Raises `ConfigError` for an unusable one.

    Clients trust the authorities of the system and those of SSL_CERT_FILE, and compare names.
    """
    certificate, key = (os.environ.get(name, "") for name in (CERTIFICATE_VARIABLE, KEY_VARIABLE))
    if not certificate and not key:
        return {}
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:  # ssl's own errors are of this kind
        files = f"{certificate or 'none'} and {key or 'none'}"
        why = f"{CERTIFICATE_VARIABLE}, {KEY_VARIABLE}: expected the files of a certificate and its key, got {files}"
        raise ConfigError(f"{why}: {error.strerror or error}") from error
    return {"ssl_certfile": certificate, "ssl_keyfile": key}


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reachable from this machine only.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "", "example.org")]
    [True, True, True, False, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening_socket(host: str, port: int) -> socket.socket:
    """Socket that listens at an address. Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            why = f"port: expected a free one on {host}, got {port} ({error.strerror}); 0 picks one"
            raise ConfigError(why) from error
        raise ConfigError(f"host: expected an address of this machine, got {host} ({error.strerror})") from error
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio leaves Nagle on for such sockets
    return listening


def url_of(listening: socket.socket, tls: TLSFiles | None = None) -> str:
    """URL at which clients reach a listening socket."""
    host, port = listening.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if listening.family is socket.AF_INET6 else f"{scheme}://{host}:{port}"


def token_file(url: str) -> Path:
    """File with the token that a server of this user at a loopback URL of this machine has made; 0600."""
    return cache_directory() / "tokens" / f"{socket.gethostname()}-{urlsplit(url).netloc}"


def at_loopback(url: str) -> str:
    """The URL with 127.0.0.1 for localhost: at ::1 another user might listen for a token."""
    return re.sub("//localhost(?=[:/]|$)", "//127.0.0.1", url, flags=re.IGNORECASE)


def own_token(url: str) -> str:
    """Token in the file of a URL; empty without one. So a user's processes find each other, and no other user's."""
    with suppress(OSError, ValueError, RuntimeError):  # no file, no URL, and no home
        return token_file(at_loopback(url)).read_text()
    return ""


def own_address(url: str) -> str:
    """Address from which this machine reaches a URL. Raises `ConfigError`."""
    parts = urlsplit(url)
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            parts.hostname or "", parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket sends nothing here
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"expected a URL that can be reached, got {url!r}: {error}") from None


def interface_towards(url: str) -> str:
    """Name of the network interface through which this machine reaches a URL. Raises `ConfigError`."""
    own = own_address(url)
    for name, addresses in psutil.net_if_addrs().items():
        if own in (one.address for one in addresses):
            return str(name)
    raise ConfigError(f"no network interface of this machine has the address {own}, which leads to {url}")


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this machine that is free now, and that no program gets that asks for any port."""
    for port in SystemRandom().sample(UNASKED_PORTS, 16):
        with suppress(OSError), socket.create_server((host, port)):
            return port
    with socket.create_server((host, 0)) as listening:
        return int(listening.getsockname()[1])
