"""A process that serves a task: asks the orchestrator for work, does it, and hands in what came of it.

Nothing listens here. While the orchestrator is away, work goes on and is handed in when it is back; when it does not
know this process any more, the work is dropped, because somebody else does it, and the process registers again.
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
from shoal.net.client import Retry, authorization, exchanged, session, words
from shoal.plugins import described
from shoal.tasks.remote_protocol import (
    Acknowledged,
    DrawJob,
    Hello,
    Job,
    JobFailed,
    JobScores,
    JobTask,
    Played,
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
"""The orchestrator may be away for as long as it likes; whoever runs the worker ends it."""
JOIN_TIMEOUT_S = 60.0
CONNECTIONS = 256
MOST_RESULTS, MOST_RESULT_BYTES = 16, 4_000_000
"""What is handed in at once is below `hub.MOST_BODY_BYTES`."""
MODEL_TRIES = 4
T = TypeVar("T")


class Gone(Exception):
    """The orchestrator does not know this process (any more)."""


@dataclass(slots=True)
class HttpModel:
    """The model behind a session's URL. Implements `sdk.Model`."""

    session: SessionAt
    http: aiohttp.ClientSession

    @property
    def base_url(self) -> str:
        """For OpenAI's clients."""
        return self.session.openai_base_url

    @property
    def api_key(self) -> str:
        """Of the session."""
        return self.session.api_key

    async def answer(self, messages: Sequence[Message], *, tools: str = "", max_tokens: int | None = None) -> Message:
        """What the model says next. Raises `PolicyFailed` when the context is full, `EnvironmentFailed` otherwise."""
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
class _Desk:
    """What a membership works on. Invariant: a lease is here until its result is acknowledged or it is cancelled."""

    running: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def holding(self) -> list[str]:
        """All leases."""
        return [*self.running, *self.results]

    def forget(self, lease: str) -> None:
        """Nobody waits for it."""
        self.results.pop(lease, None)
        task = self.running.pop(lease, None)
        if task is not None:
            task.cancel()


class RemoteWorker:
    """Serves a task for as long as it is not cancelled, whatever becomes of the orchestrator."""

    def __init__(self, served: Definition, url: str, *, token: str = "") -> None:
        """`url` is the orchestrator's; `token` what it wants of those who serve."""
        self._served = served
        self._url = url.rstrip("/")
        self._headers = authorization(token)

    async def run(self, on_joined: Callable[[str], None] = lambda member: None) -> None:
        """Registers and works. Raises `TaskError` when the orchestrator does not want this task as it is."""
        async with session(CONNECTIONS) as http:
            while True:
                welcome = await self._joined(http)
                on_joined(welcome.member)
                with contextlib.suppress(Gone):
                    await self._membership(http, welcome)

    async def _joined(self, http: aiohttp.ClientSession) -> Welcome:
        """Tries until the orchestrator is there."""
        served = self._served
        hello = msgspec.json.encode(
            Hello(served.name, served.version, served.capabilities, served.max_running, served.timeout_s)
        )
        status, body = await exchanged(
            http, "POST", f"{self._url}/v1/members", hello, self._headers, timeout_s=JOIN_TIMEOUT_S, retry=FOR_EVER
        )
        if status == 200:
            return msgspec.json.decode(body, type=Welcome)
        raise TaskError(f"the orchestrator at {self._url} said: {words(body)}")

    async def _membership(self, http: aiohttp.ClientSession, welcome: Welcome) -> None:
        """Works until the orchestrator does not know this process any more: raises `Gone`."""
        desk, at = _Desk(), f"{self._url}/v1/members/{welcome.member}"
        handing_in = asyncio.create_task(self._hand_in(http, at, desk), name="handing in results")
        try:
            while True:
                asked = WorkRequest(desk.holding)
                work = await self._posted(http, f"{at}/work", asked, Work, welcome.lease_s + welcome.beat_s)
                for lease in work.cancelled:
                    desk.forget(lease)
                for job in work.jobs:
                    doing = asyncio.create_task(self._do(http, job, desk), name=f"job {job.lease}")
                    desk.running[job.lease] = doing
                if handing_in.done():
                    handing_in.result()
        finally:
            handing_in.cancel()
            doing_all = list(desk.running.values())
            for doing in doing_all:
                doing.cancel()
            await asyncio.gather(handing_in, *doing_all, return_exceptions=True)
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(1.0), http.delete(at, headers=self._headers):
                    pass

    async def _hand_in(self, http: aiohttp.ClientSession, at: str, desk: _Desk) -> None:
        """Sends what is done, as much at once as there is."""
        while True:
            await desk.wake.wait()
            desk.wake.clear()
            while desk.results:
                sent = list(desk.results.values())[:MOST_RESULTS]
                await self._posted(http, f"{at}/results", Results(sent), Acknowledged, 60.0)
                for result in sent:
                    desk.results.pop(result.lease, None)

    async def _posted(self, http: aiohttp.ClientSession, url: str, body: object, kind: type[T], timeout_s: float) -> T:
        """The answer, asked for again while the orchestrator is away. Raises `Gone`."""
        status, answer = await exchanged(
            http, "POST", url, msgspec.json.encode(body), self._headers, timeout_s=timeout_s, retry=FOR_EVER
        )
        if status != 200:
            raise Gone
        return msgspec.json.decode(answer, type=kind)

    async def _do(self, http: aiohttp.ClientSession, job: Job, desk: _Desk) -> None:
        result = await self._result(http, job)
        if desk.running.pop(job.lease, None) is not None:
            desk.results[job.lease] = result
            desk.wake.set()

    async def _result(self, http: aiohttp.ClientSession, job: Job) -> Result:
        """What came of a job, whatever the author's code raised."""
        try:
            async with asyncio.timeout(job.deadline_s):
                result = await self._done(http, job)
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
        except Exception as error:  # an author's code is anybody's: its failure is a result
            return JobFailed(job.lease, Whose.ENVIRONMENT, described(error))

    async def _done(self, http: aiohttp.ClientSession, job: Job) -> Result:
        if isinstance(job, DrawJob):
            return JobTask(job.lease, await asyncio.to_thread(self._served.draw, job.split, job.index))
        if isinstance(job, RolloutJob):
            outcome: Outcome = await self._served.rollout(job.task, HttpModel(job.session, http))
            return Played(job.lease, outcome)
        return JobScores(job.lease, await self._served.score(job.task, job.answers))
