"""Where servers listen: on loopback, unless the user says otherwise."""

import errno
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
    """Where clients find what is served on a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if listening.family is socket.AF_INET6 else f"http://{host}:{port}"
