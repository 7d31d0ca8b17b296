"""A worker: asks the orchestrator for work, does it, and returns the results.

A worker listens on no port. While the orchestrator is away, work goes on, and its results are sent later. When the
orchestrator has forgotten the worker, the worker drops its jobs, which others do now, and registers again.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
import msgspec

from shoal.errors import EngineUnavailable, TaskError
from shoal.net.chat import ChatRefused, completion, wire_of
from shoal.net.client import Retry, authorization, exchange, session, words
from shoal.plugins import described
from shoal.tasks.remote_protocol import (
    Acknowledged,
    DrawJob,
    Hello,
    Job,
    JobFailed,
    JobOutcome,
    JobScores,
    JobTask,
    Result,
    Results,
    RolloutJob,
    SessionAt,
    Welcome,
    Whose,
    Work,
    WorkRequest,
)
from shoal.tasks.sdk import Definition, EnvironmentFailed, PolicyFailed
from shoal.types import Message, Outcome

FOR_EVER = Retry(tries=None, pause_s=0.5, growth=1.0, timeouts=True, statuses=lambda status: status >= 500)
"""Retries without end: the orchestrator may be away for any time, and the user ends the worker."""
JOIN_TIMEOUT_S = 60.0
CONNECTIONS = 256
MOST_RESULTS, MOST_RESULT_BYTES = 16, 4_000_000
"""Number and bytes of results in one request at most, below `remote_server.MOST_BODY_BYTES`."""
MODEL_TRIES = 4
T = TypeVar("T")


class Gone(Exception):
    """The orchestrator does not know this worker (any more)."""


@dataclass(slots=True)
class HttpModel:
    """The model behind a session's URL. Implements `sdk.Model`."""

    session: SessionAt
    http: aiohttp.ClientSession

    @property
    def base_url(self) -> str:
        """URL for OpenAI's clients."""
        return self.session.openai_base_url

    @property
    def api_key(self) -> str:
        """The session's key."""
        return self.session.api_key

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


@dataclass(slots=True)
class _OpenJobs:
    """The jobs of one registration.

    Invariant: a lease is here until its result is acknowledged or the lease is cancelled.
    """

    running: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def holding(self) -> list[str]:
        """All leases, of running jobs and of unacknowledged results."""
        return [*self.running, *self.results]

    def forget(self, lease: str) -> None:
        """Cancels a job and drops its result."""
        self.results.pop(lease, None)
        task = self.running.pop(lease, None)
        if task is not None:
            task.cancel()


class RemoteWorker:
    """Serves a task until it is cancelled, also while the orchestrator is away."""

    def __init__(self, served: Definition, url: str, *, token: str = "") -> None:
        """`url` is the orchestrator's; `token` is the run's."""
        self._served = served
        self._url = url.rstrip("/")
        self._headers = authorization(token)

    async def run(self, on_joined: Callable[[str], None] = lambda member: None) -> None:
        """Registers and works. Raises `TaskError` when the orchestrator does not want this task as it is."""
        async with session(CONNECTIONS) as http:
            while True:
                welcome = await self._join(http)
                on_joined(welcome.member)
                with contextlib.suppress(Gone):
                    await self._serve(http, welcome)

    async def _join(self, http: aiohttp.ClientSession) -> Welcome:
        """Registers, as soon as the orchestrator answers."""
        served = self._served
        hello = msgspec.json.encode(
            Hello(served.name, served.version, served.capabilities, served.max_running, served.timeout_s)
        )
        status, body = await exchange(
            http, "POST", f"{self._url}/v1/members", hello, self._headers, timeout_s=JOIN_TIMEOUT_S, retry=FOR_EVER
        )
        if status == 200:
            return msgspec.json.decode(body, type=Welcome)
        raise TaskError(f"the orchestrator at {self._url} said: {words(body)}")

    async def _serve(self, http: aiohttp.ClientSession, welcome: Welcome) -> None:
        """Works until the orchestrator does not know this worker any more: raises `Gone`."""
        open_jobs, at = _OpenJobs(), f"{self._url}/v1/members/{welcome.member}"
        handing_in = asyncio.create_task(self._hand_in(http, at, open_jobs), name="handing in results")
        try:
            while True:
                asked = WorkRequest(open_jobs.holding)
                work = await self._post(http, f"{at}/work", asked, Work, welcome.lease_s + welcome.beat_s)
                for lease in work.cancelled:
                    open_jobs.forget(lease)
                for job in work.jobs:
                    doing = asyncio.create_task(self._do(http, job, open_jobs), name=f"job {job.lease}")
                    open_jobs.running[job.lease] = doing
                if handing_in.done():
                    handing_in.result()
        finally:
            handing_in.cancel()
            doing_all = list(open_jobs.running.values())
            for doing in doing_all:
                doing.cancel()
            await asyncio.gather(handing_in, *doing_all, return_exceptions=True)
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(1.0), http.delete(at, headers=self._headers):
                    pass

    async def _hand_in(self, http: aiohttp.ClientSession, at: str, open_jobs: _OpenJobs) -> None:
        """Sends finished results, as many at once as the limits allow."""
        while True:
            await open_jobs.wake.wait()
            open_jobs.wake.clear()
            while open_jobs.results:
                sent = list(open_jobs.results.values())[:MOST_RESULTS]
                await self._post(http, f"{at}/results", Results(sent), Acknowledged, 60.0)
                for result in sent:
                    open_jobs.results.pop(result.lease, None)

    async def _post(self, http: aiohttp.ClientSession, url: str, body: object, kind: type[T], timeout_s: float) -> T:
        """Posts a request and returns the answer, with retries while the orchestrator is away. Raises `Gone`."""
        status, answer = await exchange(
            http, "POST", url, msgspec.json.encode(body), self._headers, timeout_s=timeout_s, retry=FOR_EVER
        )
        if status != 200:
            raise Gone
        return msgspec.json.decode(answer, type=kind)

    async def _do(self, http: aiohttp.ClientSession, job: Job, open_jobs: _OpenJobs) -> None:
        result = await self._result(http, job)
        if open_jobs.running.pop(job.lease, None) is not None:
            open_jobs.results[job.lease] = result
            open_jobs.wake.set()

    async def _result(self, http: aiohttp.ClientSession, job: Job) -> Result:
        """Does a job; an exception of the author's code becomes a `JobFailed`."""
        try:
            async with asyncio.timeout(job.deadline_s):
                result = await self._run(http, job)
            if (size := len(msgspec.json.encode(result))) > MOST_RESULT_BYTES:
                why = f"expected a result of at most {MOST_RESULT_BYTES} bytes, got {size}"
                return JobFailed(job.lease, Whose.ENVIRONMENT, why)
            return result
        except PolicyFailed as failure:
            return JobFailed(job.lease, Whose.POLICY, str(failure)[:4096])
        except EnvironmentFailed as failure:
            return JobFailed(job.lease, Whose.ENVIRONMENT, str(failure)[:4096], failure.retry)
        except TimeoutError:
            return JobFailed(job.lease, Whose.ENVIRONMENT, f"it took longer than {job.deadline_s:.3g} s")
        except Exception as error:  # an author's code may raise anything: its failure is a result
            return JobFailed(job.lease, Whose.ENVIRONMENT, described(error))

    async def _run(self, http: aiohttp.ClientSession, job: Job) -> Result:
        if isinstance(job, DrawJob):
            return JobTask(job.lease, await asyncio.to_thread(self._served.draw, job.split, job.index))
        if isinstance(job, RolloutJob):
            outcome: Outcome = await self._served.rollout(job.task, HttpModel(job.session, http))
            return JobOutcome(job.lease, outcome)
        return JobScores(job.lease, await self._served.score(job.task, job.answers))
