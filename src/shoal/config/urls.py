"""Checks addresses in settings without connecting to them."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from shoal.errors import ConfigError

HTTP = ("http", "https")
NATS = ("nats", "tls", "ws", "wss")


def checked_url(field: str, url: str, schemes: Sequence[str] = HTTP) -> str:
    """The URL. Raises `ConfigError` naming the field when it has no host, another scheme or an invalid port.

    >>> checked_url("engine.urls", "http://127.0.0.1:8000")
    'http://127.0.0.1:8000'
    """
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid port or brackets
        is_one = False
    if not is_one or any(not letter.isprintable() or letter.isspace() for letter in url):
        raise ConfigError(f"{field}: expected {schemes[0]}://HOST:PORT or {schemes[1]}://HOST:PORT, got {url!r}")
    return url
