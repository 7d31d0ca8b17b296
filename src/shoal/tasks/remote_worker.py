"""A worker: connects to a run, does the jobs that it gets, and returns the results.

A worker listens on no port. While the run is away it keeps reconnecting; its jobs are dropped, since other workers
get them.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from shoal.errors import EngineUnavailable
from shoal.net.chat import TIMEOUT_S, ChatRefused, close_clients, completion, session_client, wire_of
from shoal.net.client import session
from shoal.net.joining import Answering, hold_lease
from shoal.plugins import described
from shoal.tasks.remote_protocol import DrawJob, Job, JobDone, JobFailed, RolloutJob, TaskRole
from shoal.tasks.sdk import Definition, EnvironmentFailed, PolicyFailed
from shoal.types import Message
from shoal.wire import sendable

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CONNECTIONS = 256
MOST_RESULT_BYTES = 4_000_000
MOST_RUNNING = 64
"""Rollouts at once of a task that names no limit."""
MODEL_TRIES = 4
MOST_REASON = 4096


@dataclass(frozen=True, slots=True)
class HttpModel:
    """The model behind a session's URL. Implements `interfaces.Model`."""

    base_url: str
    anthropic_base_url: str
    api_key: str
    http: aiohttp.ClientSession

    async def answer(self, messages: Sequence[Message], *, tools: str = "", max_tokens: int | None = None) -> Message:
        """The model's next message. Raises `PolicyFailed` when the context is full, `EnvironmentFailed` otherwise."""
        body: dict[str, object] = {"model": "policy", "messages": [wire_of(message) for message in messages]}
        if tools:
            body["tools"] = msgspec.Raw(tools.encode())
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        try:
            choice = await completion(self.http, self.base_url, body, key=self.api_key, tries=MODEL_TRIES)
        except ChatRefused as refusal:
            full = refusal.code == "context_length_exceeded"
            raise PolicyFailed(str(refusal)) if full else EnvironmentFailed(str(refusal)) from None
        except EngineUnavailable as error:
            raise EnvironmentFailed(f"the model does not answer: {error}", retry=True) from None
        return choice.message.message

    def openai(self) -> "AsyncOpenAI":
        """OpenAI's client of this session; see `net.openai_client`."""
        return session_client(self.base_url, self.api_key, TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class RemoteWorker:
    """Serves a task until it is cancelled, also while the run is away."""

    served: Definition
    url: str
    """The run's."""
    token: str = ""

    async def run(self, announce: Callable[[str], None] = lambda sentence: None) -> None:
        """Registers and works; `announce` gets a sentence when the run takes it, refuses it or is away.

        Raises `ConfigError` without the token, and when the run does not want this task as it is.
        """
        one = self.served
        most = one.max_running or MOST_RUNNING
        role = TaskRole(one.name, one.version, one.converses, one.scores, most, one.timeout_s)
        try:
            await hold_lease(self.url.rstrip("/"), self.token, role, announce, self._working)
        finally:
            await close_clients()

    @asynccontextmanager
    async def _working(self, _: aiohttp.ClientWebSocketResponse) -> AsyncIterator[Answering]:
        async with session(CONNECTIONS) as http:

            async def answer(request: bytes) -> bytes:
                """Result of a job."""
                return await result_of(self._done(http, request))

            yield answer

    async def _done(self, http: aiohttp.ClientSession, request: bytes) -> object:
        """Does a job. Raises any exception of the author's code."""
        job = msgspec.json.decode(request, type=Job)
        if isinstance(job, DrawJob):
            return await self.served.drawn(job.split, job.index)
        if isinstance(job, RolloutJob):
            model = HttpModel(job.base_url, job.anthropic_base_url, job.api_key, http)
            return await self.served.rollout(job.task, model)
        return await self.served.score(job.task, job.answers)


async def result_of(doing: Awaitable[object]) -> bytes:
    """Message with the value of a job, or with its failure."""
    try:
        value = msgspec.json.encode(await doing)
        if len(value) > MOST_RESULT_BYTES:
            raise EnvironmentFailed(f"expected a result of at most {MOST_RESULT_BYTES} bytes, got {len(value)}")
        return msgspec.json.encode(JobDone(msgspec.Raw(value)))
    except PolicyFailed as failure:
        return _failed(str(failure), by_policy=True)
    except EnvironmentFailed as failure:
        return _failed(str(failure), retry=failure.retry)
    except Exception as error:  # an author's code may raise anything: its failure is a result
        return _failed(described(error))


def _failed(reason: str, *, retry: bool = False, by_policy: bool = False) -> bytes:
    """Failure with a reason that JSON can carry."""
    return msgspec.json.encode(JobFailed(sendable(reason[:MOST_REASON]), retry, by_policy))
