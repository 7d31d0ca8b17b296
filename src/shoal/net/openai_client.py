"""OpenAI's client for sessions: one per event loop, whose connections all sessions share.

Creating a client costs processor time and blocks the event loop, so no rollout has a separate one.
"""

import asyncio
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from shoal.errors import TaskError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_shared: "WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI]" = WeakKeyDictionary()


def session_client(base_url: str, key: str, timeout_s: float) -> "AsyncOpenAI":
    """Client of `base_url` that shares the connections of this event loop's other clients.

    Raises `TaskError` without the package openai.
    """
    loop = asyncio.get_running_loop()
    if loop not in _shared:
        try:
            from openai import AsyncOpenAI
        except ModuleNotFoundError:
            raise TaskError("expected the package openai; pip install 'shoal[agents]' brings it") from None
        _shared[loop] = AsyncOpenAI(api_key="-", base_url="http://127.0.0.1")
    return _shared[loop].with_options(base_url=base_url, api_key=key, timeout=timeout_s)


async def close_clients() -> None:
    """Closes the connections of this event loop's clients."""
    shared = _shared.pop(asyncio.get_running_loop(), None)
    if shared is not None:
        await shared.close()
