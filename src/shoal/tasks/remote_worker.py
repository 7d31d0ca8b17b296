"""A worker: connects to a run, does the jobs that it gets, and returns the results.

A worker listens on no port. While the run is away it keeps reconnecting; its jobs are dropped, since other workers
get them.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from shoal.errors import EngineUnavailable, TaskError
from shoal.net.chat import TIMEOUT_S, ChatRefused, completion, wire_of
from shoal.net.client import LEASE_S, authorization, session
from shoal.net.openai_client import close_clients, session_client
from shoal.plugins import described
from shoal.tasks.remote_protocol import (
    PATH,
    Cancel,
    DrawJob,
    Hello,
    Job,
    JobFailed,
    JobOutcome,
    JobScores,
    JobTask,
    Result,
    RolloutJob,
    ToWorker,
    Unwanted,
    Welcome,
)
from shoal.tasks.sdk import Definition, EnvironmentFailed, PolicyFailed
from shoal.types import Message

if TYPE_CHECKING:
    from openai import AsyncOpenAI

RECONNECT_S = 0.5
CONNECTIONS = 256
MOST_RESULT_BYTES = 4_000_000
MOST_RUNNING = 64
"""Rollouts at once of a task that names no limit."""
MODEL_TRIES = 4


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


class RemoteWorker:
    """Serves a task until it is cancelled, also while the run is away."""

    def __init__(self, served: Definition, url: str, *, token: str = "") -> None:
        """`url` is the run's, as is `token`."""
        self._served = served
        self._url = url.rstrip("/")
        self._headers = authorization(token)

    async def run(
        self, on_joined: Callable[[], None] = lambda: None, on_away: Callable[[], None] = lambda: None
    ) -> None:
        """Registers and works; `on_away` is called once for each time in which the run is not there.

        Raises `TaskError` when the run does not want this task as it is.
        """
        away = False
        async with session(CONNECTIONS) as http, contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(close_clients)
            while True:
                try:
                    opening = http.ws_connect(
                        self._url + PATH, headers=self._headers, heartbeat=LEASE_S / 2, max_msg_size=0
                    )
                    async with opening as socket:
                        away = False
                        await self._serve(http, socket, on_joined)
                except aiohttp.WSServerHandshakeError as error:
                    if 400 <= error.status < 500:
                        raise TaskError(
                            f"the run at {self._url} answers HTTP {error.status}; what is its token?"
                        ) from None
                except (aiohttp.ClientError, OSError):
                    pass
                if not away:
                    on_away()
                away = True
                await asyncio.sleep(RECONNECT_S)

    async def _serve(
        self, http: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, on_joined: Callable[[], None]
    ) -> None:
        """Works until the connection ends."""
        one = self._served
        most = one.max_running or MOST_RUNNING
        hello = Hello(one.name, one.version, one.converses, one.scores, most, one.timeout_s)
        await socket.send_str(msgspec.json.encode(hello).decode())
        running: dict[str, asyncio.Task[None]] = {}
        try:
            async for received in socket:
                message: ToWorker = msgspec.json.decode(received.data, type=ToWorker)
                if isinstance(message, Welcome):
                    on_joined()
                elif isinstance(message, Unwanted):
                    raise TaskError(f"the run at {self._url} said: {message.reason}")
                elif isinstance(message, Cancel):
                    if message.lease in running:
                        running[message.lease].cancel()
                else:
                    doing = asyncio.create_task(self._do(http, socket, message))
                    running[message.lease] = doing
                    doing.add_done_callback(partial(running.pop, message.lease))
        finally:
            doing_all = list(running.values())
            for doing in doing_all:
                doing.cancel()
            await asyncio.gather(*doing_all, return_exceptions=True)

    async def _do(self, http: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, job: Job) -> None:
        sent = msgspec.json.encode(await self._result(http, job))
        if len(sent) > MOST_RESULT_BYTES:
            why = f"expected a result of at most {MOST_RESULT_BYTES} bytes, got {len(sent)}"
            sent = msgspec.json.encode(JobFailed(job.lease, why))
        with contextlib.suppress(aiohttp.ClientError, OSError):  # the run is away, and has given the job to another
            await socket.send_str(sent.decode())

    async def _result(self, http: aiohttp.ClientSession, job: Job) -> Result:
        """Does a job; an exception of the author's code becomes a `JobFailed`."""
        try:
            async with asyncio.timeout(job.deadline_s):
                if isinstance(job, DrawJob):
                    return JobTask(job.lease, await self._served.drawn(job.split, job.index))
                if isinstance(job, RolloutJob):
                    at = job.session
                    model = HttpModel(at.base_url, at.anthropic_base_url, at.api_key, http)
                    return JobOutcome(job.lease, await self._served.rollout(job.task, model))
                return JobScores(job.lease, await self._served.score(job.task, job.answers))
        except PolicyFailed as failure:
            return JobFailed(job.lease, str(failure)[:4096], by_policy=True)
        except EnvironmentFailed as failure:
            return JobFailed(job.lease, str(failure)[:4096], failure.retry)
        except TimeoutError:
            return JobFailed(job.lease, f"it took longer than {job.deadline_s:.3g} s")
        except Exception as error:  # an author's code may raise anything: its failure is a result
            return JobFailed(job.lease, described(error))
