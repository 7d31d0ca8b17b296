"""Clients of inference servers of other projects: the interface of an adapter, and the part that all share."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec

from shoal.engine.protocol import VersionSpan
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


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """One completion as a server reports it."""

    token_ids: tuple[int, ...]  # [L]
    logprobs: tuple[float, ...]  # [L] nats
    finish_reason: FinishReason
    spans: Sequence[VersionSpan] | None
    """Spans by Version; None when the server does not report it."""


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Counters of a server since it started; `running` and `waiting` are current numbers."""

    running: int
    waiting: int
    tokens_drawn: int
    tokens_prefilled: int


class ServerAdapter(Protocol):
    """Client of one kind of server. Methods raise `RequestRefused` or `EngineUnavailable`."""

    async def abilities(self) -> Abilities:
        """Detects the server's abilities. Raises `ConfigError` when it lacks one that Shoal needs."""

    async def sample(
        self, name: str, prompt_ids: Sequence[int], sampling: Sampling, n: int, priority: int | None, salt: str | None
    ) -> list[SampledCompletion]:
        """Samples `n` completions; requests with different `salt` share no KV."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs in nats at temperature 1 of tokens 1..L-1."""

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

    async def counters(self) -> ServerCounters | None:
        """Counters of the server; None when it has no metrics."""

    async def aclose(self) -> None:
        """Closes the connections."""


class ListedModel(msgspec.Struct):
    """Model in a server's list."""

    owned_by: str = ""
    max_model_len: int = 0


class Models(msgspec.Struct):
    """Answer of `GET /v1/models`."""

    data: list[ListedModel]


class HttpAdapter:
    """Part of an adapter that all servers share."""

    name: str
    metrics: Mapping[str, str]
    """Names of the server's metrics, with those of `ServerCounters`."""

    def __init__(self, url: str, token: str = "") -> None:
        self._client = Client(url, token=token)

    async def longest(self) -> int:
        """Tokens of the longest sequence that the server takes."""
        return (await self._client.ask("GET", "/v1/models", Models)).data[0].max_model_len

    async def alive(self) -> None:
        """Returns when `/health` answers 200; 503 is a server whose engine has died."""
        status, _ = await self._client.status("GET", "/health")
        if status != 200:
            raise EngineUnavailable(f"{self.name} at {self._client.url} says HTTP {status} of its health")

    async def counters(self) -> ServerCounters | None:
        """Counters from Prometheus metrics; None when the server has none."""
        status, data = await self._client.status("GET", "/metrics")
        return ServerCounters(**counted(data.decode(errors="replace"), self.metrics)) if status == 200 else None

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
    return int(label) if label.isdecimal() else None


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
