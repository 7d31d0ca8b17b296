"""Facts about the client of a request: its key, whether it retries, and whether it has left."""

from starlette.requests import Request

from shoal.net.client import RETRY_HEADER

SESSION = "/s/"
"""Path prefix of sessions."""


def has_left(http: Request) -> bool:
    """Whether the server knows by now that the client of a fully read request has disconnected.

    It polls once and does not wait. Starlette's `is_disconnected` starts a wait and cancels it, which takes two more
    iterations of the event loop, behind all other requests.
    """
    receiving = http.receive().__await__()
    try:
        next(receiving)
    except StopIteration as message:
        return bool(message.value["type"] == "http.disconnect")
    finally:
        receiving.close()
    return False


def is_retry(http: Request) -> bool:
    """Whether a client library marks the request as a retry."""
    count = http.headers.get(RETRY_HEADER, "0")
    return count.isdigit() and count != "0"


def api_key(http: Request) -> str:
    """API key in the header of OpenAI's or Anthropic's clients."""
    return http.headers.get("x-api-key") or http.headers.get("authorization", "")[len("bearer ") :]


def shown_path(path: str) -> str:
    """Path for the log, with the session's key shortened."""
    if not path.startswith(SESSION):
        return path
    key, slash, rest = path.removeprefix(SESSION).partition("/")
    return f"{SESSION}{key[:8]}...{slash}{rest}"
