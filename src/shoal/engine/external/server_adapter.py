"""Clients of inference servers of other projects: the interface of an adapter, and the part that all share."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from shoal.engine.pool.answers import MOST_TOKENS
from shoal.engine.server.protocol import VersionSpan
from shoal.errors import EngineUnavailable
from shoal.net.client import Client
from shoal.types import FinishReason, Sampling


class StopMode(StrEnum):
    """Ways to stop a server for new weights."""

    KEEP_AND_RECOMPUTE = "keep and recompute"
    KEEP = "keep"
    DRAIN = "drain"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Abilities:
    """Abilities that a server reports."""

    server: str
    """Name and version of the server, for people."""
    max_model_len: int
    reports_version: bool
    """Whether the server reports which weights it serves."""
    keeps_requests: bool
    """Whether the server can pause without ending its requests."""
    priorities: bool = False
    grammars: bool = False
    """Whether the server samples under a grammar in llguidance's Lark syntax."""


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """One completion as a server reports it."""

    token_ids: tuple[int, ...]  # [L]
    logprobs: tuple[float, ...]  # [L] nats
    finish_reason: FinishReason
    spans: Sequence[VersionSpan] | None
    """Spans by Version; None when the server does not report it."""
    kept: tuple[bytes, ...] = ()
    """As `Completion.kept`."""
    routing: bytes = b""
    """As `Completion.routing`."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for `n` completions of one prompt."""

    name: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    n: int = 1
    priority: int | None = None
    """Larger goes first; None for servers without priorities."""
    salt: str | None = None
    """Requests with different salts share no KV."""
    adapter: str | None = None
    """Name of a loaded adapter; None for the weights alone."""


class ServerAdapter(Protocol):
    """Client of one kind of server. Methods raise `RequestRefused` or `EngineUnavailable`."""

    async def abilities(self) -> Abilities:
        """Detects the server's abilities. Raises `ConfigError` when it lacks one that Shoal needs."""

    async def sample(self, asked: Asked) -> list[SampledCompletion]:
        """Samples completions."""

    async def score(self, token_ids: Sequence[int], adapter: str | None = None) -> list[float]:
        """Logprobs in nats at temperature 1 of tokens 1..L-1, under a named adapter or the weights alone."""

    async def takes_adapters(self) -> bool:
        """Whether the server has the routes for adapters."""

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Loads the adapter in a directory under a new name, while requests go on."""

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter."""

    async def adapters(self) -> list[str]:
        """Names of the model and of all loaded adapters."""

    async def stop(self, how: StopMode) -> None:
        """Stops the server; returns once it computes nothing."""

    async def load(self, directory: Path, version: int, how: StopMode) -> None:
        """Loads the safetensors in a directory into the stopped server, as `version`."""

    async def version(self) -> int | None:
        """Version that a run gave the weights; None when no run has since the server started."""

    async def label(self, version: int) -> None:
        """Labels the current weights as `version`."""

    async def resume(self) -> None:
        """Ends a stop."""

    async def abort(self) -> None:
        """Ends all requests and returns their sampled tokens."""

    async def alive(self) -> None:
        """Returns when the server answers."""

    async def counters(self) -> dict[str, int]:
        """Figures of the server by their names in `EngineInfo`; none when it has no metrics."""

    async def aclose(self) -> None:
        """Closes the connections."""


class ListedModel(msgspec.Struct):
    """Model in a server's list."""

    id: str = ""
    owned_by: str = ""
    max_model_len: int | None = None
    """None for an adapter."""


class Models(msgspec.Struct):
    """Answer of `GET /v1/models`."""

    data: Annotated[list[ListedModel], msgspec.Meta(min_length=1)]


class HttpAdapter:
    """Part of an adapter that all servers share."""

    name: str
    metrics: Mapping[str, str]
    """Names of the server's metrics, with those of `EngineInfo`."""
    adapter_routes: str
    """Path before the routes that load and unload adapters."""

    def __init__(
        self, url: str, token: str = "", vocabulary: int = MOST_TOKENS, routers: Mapping[int, int] | None = None
    ) -> None:
        """`routers` has the number of experts of each layer with a router, where a run replays the experts."""
        self._client = Client(url, token=token)
        self._vocabulary, self._routers = vocabulary, routers or {}

    async def longest(self) -> int:
        """Tokens of the longest sequence that the server takes."""
        longest = (await self._client.ask("GET", "/v1/models", Models)).data[0].max_model_len
        if longest is None:
            raise EngineUnavailable(f"{self.name} at {self._client.url} does not report max_model_len")
        return longest

    async def takes_adapters(self) -> bool:
        """Whether the server has the routes for adapters."""
        return await self._client.has_route(f"{self.adapter_routes}/load_lora_adapter")

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Loads the adapter in a directory under a new name, while requests go on."""
        body = {"lora_name": name, "lora_path": str(directory)}
        await self._client.post(f"{self.adapter_routes}/load_lora_adapter", body)

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter."""
        await self._client.post(f"{self.adapter_routes}/unload_lora_adapter", {"lora_name": name})

    async def adapters(self) -> list[str]:
        """Names of the model and of all loaded adapters."""
        return [one.id for one in (await self._client.ask("GET", "/v1/models", Models)).data]

    async def alive(self) -> None:
        """Returns when `/health` answers 200; 503 is a server whose engine has died."""
        status, _ = await self._client.status("GET", "/health")
        if status != 200:
            raise EngineUnavailable(f"{self.name} at {self._client.url} answered HTTP {status} on its health route")

    async def counters(self) -> dict[str, int]:
        """Figures from Prometheus metrics; none when the server has none."""
        status, data = await self._client.status("GET", "/metrics")
        return counted(data.decode(errors="replace"), self.metrics) if status == 200 else {}

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.aclose()


def finish_reason(name: str) -> FinishReason:
    """Finish reason for a server's word. Raises `EngineUnavailable` when the word is unknown."""
    try:
        return FinishReason(name)
    except ValueError:
        raise EngineUnavailable(
            f"the server ended an answer with {name!r}; expected one of {', '.join(FinishReason)}"
        ) from None


def numbered(label: str) -> int | None:
    """Version that a label names; None for a label such as `default`, which a restarted server reports."""
    return int(label) if re.fullmatch("[0-9]{1,18}", label) else None


def counted(exposition: str, names: Mapping[str, str]) -> dict[str, int]:
    """Numbers of a Prometheus text under Shoal's names, summed over labels; absent metrics are 0.

    >>> counted('# HELP a b\\na_total{x="1"} 2.0\\na_total{x="2"} 3.0\\nab 9.0\\n', {"a_total": "a"})
    {'a': 5}
    """
    sums = dict.fromkeys(names.values(), 0)
    for line in exposition.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in names:
            with contextlib.suppress(ValueError, OverflowError):  # lines whose value is no finite number count nothing
                sums[names[name]] += int(float(line.rpartition(" ")[2]))
    return sums
