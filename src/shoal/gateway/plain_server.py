"""Model server of the gateway: answers chat and text completions without a session, token by token where asked.

Each choice is an answer of its own at the engine, which computes an equal prompt once. A stop string ends the answer at
the engine too, and so does a client that disconnects: nobody trains on these tokens.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from shoal.errors import EngineUnavailable, ShoalError
from shoal.gateway.dialects import Dialect, R
from shoal.gateway.home_page import home_page
from shoal.gateway.plain_answers import Answering, Choice, chat_choice, text_choice
from shoal.gateway.plain_options import plain_options
from shoal.gateway.plain_streams import CompletionStream, EventStream, StreamForm
from shoal.gateway.request_log import RequestRecord
from shoal.gateway.sessions import AnswerRequest, SessionContext
from shoal.interfaces import ModelServer
from shoal.net.server import disconnected, json
from shoal.types import FinishReason

EVERY = 8
"""Tokens between two looks for a stop string, where no stream wants them sooner."""
TEXT_ID = "cmpl-"
"""Beginning of the ids of text completions."""


@dataclass(frozen=True, slots=True)
class PlainJob:
    """A plain request with its choices."""

    answering: Answering
    ask: AnswerRequest
    """The request, or the first of its prompts."""
    streams: bool
    grammar: str
    prompts: tuple[tuple[int, ...], ...]
    choices: tuple[Choice, ...]


LateError: TypeAlias = Callable[[ShoalError], bytes]
"""Function from an error to the event that reports it in a stream."""


@dataclass(frozen=True, slots=True)
class PlainServer:
    """Answers plain requests with the model behind `server`."""

    server: ModelServer
    context: SessionContext
    model: str
    keep_alive_s: float

    async def home(self, http: Request) -> Response:
        """Page that says what is served, and how to ask."""
        chats = self.context.renderer.has_template
        return home_page(http, model=self.model, longest=self.context.max_model_len, chats=chats)

    async def answer(
        self,
        http: Request,
        dialect: Dialect[R],
        request: R,
        asks: Sequence[AnswerRequest],
        record: RequestRecord,
        late: LateError,
    ) -> Response:
        """Answers a request with one body, or with a stream. Raises a `ShoalError`."""
        job = await self._job(dialect, request, asks)
        if not request.stream:
            return await self._body(job, http, record)
        form: StreamForm = EventStream(job.answering, dialect, request)
        if not dialect.named:
            form = CompletionStream(job.answering, chat=asks[0].prompt is None)
        return await self._streamed(job, form, record, late)

    async def _job(self, dialect: Dialect[R], request: R, asks: Sequence[AnswerRequest]) -> PlainJob:
        options = plain_options(request)
        prefix = "" if dialect.named else "chatcmpl-" if asks[0].prompt is None else TEXT_ID
        prompts = [await self.context.prompt_ids(ask) for ask in asks]
        name, spell = f"{prefix}{secrets.token_hex(12)}", self.context.renderer.token_bytes
        answering = Answering(name, self.model, int(time.time()), options, spell)
        repeated = [(ask, prompt) for ask, prompt in zip(asks, prompts, strict=True) for _ in range(options.n)]
        read = self.context.reader
        choices = tuple(Choice(index, prompt, read(ask)) for index, (ask, prompt) in enumerate(repeated))
        return PlainJob(
            answering, asks[0], bool(request.stream), self.context.grammar(asks[0]), tuple(prompts), choices
        )

    async def _streamed(self, job: PlainJob, form: StreamForm, record: RequestRecord, late: LateError) -> Response:
        chunks = self._chunks(job, form, record, late)
        first = await anext(chunks)  # an error before the first token has a status of its own
        return StreamingResponse(_after(first, chunks), media_type="text/event-stream")

    async def _body(self, job: PlainJob, http: Request, record: RequestRecord) -> Response:
        await self._all_answered(job, http, record)
        chat = not job.answering.id.startswith(TEXT_ID)
        choice_of = chat_choice if chat else text_choice
        choices = [choice_of(job.answering, choice) for choice in job.choices]
        head = job.answering.head("chat.completion" if chat else "text_completion")
        return json({**head, "choices": choices, "usage": job.answering.usage(job.choices, job.prompts)})

    async def _all_answered(self, job: PlainJob, http: Request, record: RequestRecord) -> None:
        """Waits for all choices, whose answers end when one fails or the client disconnects."""
        record.id, record.prompt_tokens = job.answering.id, sum(map(len, job.prompts))
        tasks = [asyncio.create_task(self._answered(choice, job), name="plain choice") for choice in job.choices]
        answered, left = asyncio.gather(*tasks), asyncio.create_task(disconnected(http))
        try:
            await asyncio.wait((answered, left), return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise ClientDisconnect
            answered.result()
        finally:
            for task in (*tasks, left):
                task.cancel()
            await asyncio.gather(*tasks, left, return_exceptions=True)
            self._record(job, record)

    def _record(self, job: PlainJob, record: RequestRecord) -> None:
        record.completion_tokens = sum(len(choice.tokens) for choice in job.choices)
        record.finish = ",".join(sorted({one.finish_reason or "unfinished" for one in job.choices}))
        self.context.counted["drawn_tokens"] += record.completion_tokens

    async def _answered(self, choice: Choice, job: PlainJob) -> None:
        async with aclosing(self._pieces(choice, job)) as pieces:
            async for _ in pieces:
                pass

    async def _pieces(self, choice: Choice, job: PlainJob) -> AsyncGenerator[None, None]:
        """Adds tokens to a choice until it ends; one step for each piece of it."""
        options = job.answering.options
        if options.echo and options.logprobs and len(choice.prompt_ids) > 1:
            choice.prompt = tuple(await self.server.prompt_logprobs(choice.prompt_ids, options.rules.top))
        if options.max_tokens == 0:
            choice.finish_reason = FinishReason.LENGTH
            return
        every = 1 if job.streams else EVERY if choice.text.watches else 0
        room = self.context.max_model_len - len(choice.prompt_ids)
        most = min(options.max_tokens or room, room)
        sampling = replace(
            job.ask.sampling.sampling(most, self.context.renderer.stop_token_ids),
            seed=options.seed_of(choice.index % options.n),
            grammar=job.grammar,
            begun=len(self.context.renderer.token_ids(job.ask.conversation.begun)),
        )
        async with aclosing(self.server.stream(choice.prompt_ids, sampling, options.rules, every=every)) as stream:
            async for new in stream:
                if new.finish_reason is FinishReason.ABORT:
                    raise EngineUnavailable("the engine aborted the answer")
                choice.tokens += new.tokens
                ids = [one.id for one in new.tokens]
                size = 4 * len(choice.tokens) if choice.text.parses else 0
                await self.context.computed(size, choice.text.add, ids, last=new.finish_reason is not None)
                choice.finish_reason = FinishReason.STOP if choice.text.stopped else new.finish_reason
                if choice.text.stopped:
                    del choice.tokens[choice.text.kept() :]
                yield
                if choice.finish_reason is not None:
                    return

    async def _chunks(
        self, job: PlainJob, form: StreamForm, record: RequestRecord, late: LateError
    ) -> AsyncIterator[bytes]:
        """Events of a stream: comments while nothing comes, then the chunks of all choices as they come."""
        record.id, record.prompt_tokens = job.answering.id, sum(map(len, job.prompts))
        queue: asyncio.Queue[Choice | ShoalError | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._feed(choice, job, queue), name="plain choice") for choice in job.choices]
        running, began, began_s = len(tasks), False, time.monotonic()
        try:
            while running:
                try:
                    async with asyncio.timeout(self.keep_alive_s):
                        came = await queue.get()
                except TimeoutError:
                    began = True
                    yield b": keep-alive\n\n"
                    continue
                if isinstance(came, ShoalError):
                    if not began:
                        raise came
                    yield late(came)
                    return
                began = True
                if came is None:
                    running -= 1
                    continue
                if not record.first_token_s:
                    record.first_token_s = time.monotonic() - began_s
                    for chunk in form.opening(job.choices):
                        yield chunk
                for chunk in form.news(came):
                    yield chunk
            for chunk in form.end(job.choices, job.prompts):
                yield chunk
        finally:
            self._record(job, record)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, choice: Choice, job: PlainJob, queue: "asyncio.Queue[Choice | ShoalError | None]") -> None:
        """Puts a choice into the queue whenever it has grown, then None or its error."""
        try:
            async with aclosing(self._pieces(choice, job)) as pieces:
                async for _ in pieces:
                    queue.put_nowait(choice)
        except ShoalError as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk
