"""Versions of a run with adapters on a server of another project: each is an adapter with its Version in the name.

A name never changes its weights, so all tokens of a request are of one Version, and requests under way need no pause.
Servers key their prefix caches by that name.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from shoal.engine.external.server_adapter import ServerAdapter
from shoal.errors import ConfigError

PREFIX = "shoal-"


class NamedVersions:
    """Adapters that a run has loaded into a server; `newest` is for new requests, None for the weights alone.

    Invariant: an adapter stays loaded while a request uses it.
    """

    def __init__(self, server: ServerAdapter) -> None:
        self._server = server
        self._users: Counter[str] = Counter()
        self._loaded: list[str] = []
        self.newest: str | None = None

    async def start(self, server_name: str) -> None:
        """Unloads adapters of an ended run. Raises `ConfigError` for a server that loads no adapters."""
        if not await self._server.takes_adapters():
            raise ConfigError(
                f"engine.adapters: {server_name} loads no adapters; start it with --enable-lora --max-lora-rank RANK "
                "(vLLM: and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True), or leave the setting out"
            )
        for name in await self._server.adapters():
            if name.startswith(PREFIX):
                await self._server.unload_adapter(name)

    async def load(self, directory: Path, version: int) -> str:
        """Loads the adapter of a Version; returns its name, which no request uses yet."""
        name = f"{PREFIX}{uuid4().hex[:8]}-v{version}"
        await self._server.load_adapter(name, directory)
        self._loaded.append(name)
        return name

    @contextmanager
    def used(self) -> Iterator[str | None]:
        """Name of the newest adapter, which stays loaded inside."""
        name = self.newest
        if name is not None:
            self._users[name] += 1
        try:
            yield name
        finally:
            if name is not None:
                self._users[name] -= 1

    async def lost(self) -> bool:
        """Whether the server no longer has the newest adapter, as after a restart."""
        return self.newest is not None and self.newest not in await self._server.adapters()

    async def unload_unused(self) -> None:
        """Unloads older adapters that no request uses."""
        for name in [name for name in self._loaded if name != self.newest and not self._users[name]]:
            self._loaded.remove(name)
            await self._server.unload_adapter(name)
