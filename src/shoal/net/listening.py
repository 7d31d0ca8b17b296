"""Listening sockets of servers: on loopback, unless the user chooses another address."""

import errno
import ipaddress
import socket

from shoal.errors import ConfigError


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


def url_of(listening: socket.socket) -> str:
    """URL at which clients reach a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if listening.family is socket.AF_INET6 else f"http://{host}:{port}"
