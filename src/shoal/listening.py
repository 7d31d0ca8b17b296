"""Where servers listen: on loopback, unless the user says otherwise."""

import ipaddress
import socket

from shoal.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host name or address.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "", "example.org")]
    [True, True, True, False, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that is ready to be served on. Raises `ConfigError`."""
    try:
        listening = socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise ConfigError(f"port: expected a free one on {host}, got {port} ({error.strerror}); 0 picks one") from error
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio leaves Nagle on for such sockets
    return listening
