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
from functools import partial
from html import escape
from json import dumps as json_text
from typing import TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from shoal.errors import ContextOverflow, EngineUnavailable, SessionError, ShoalError
from shoal.gateway.answer_text import AnswerText
from shoal.gateway.chat import chat_ask
from shoal.gateway.dialects import Dialect, R
from shoal.gateway.plain_answers import Answering, Choice, chat_choice, text_choice
from shoal.gateway.plain_requests import (
    MOST_CHOICES,
    PlainOptions,
    chat_request,
    plain_options,
    prompts_of,
    text_request,
)
from shoal.gateway.plain_streams import CompletionStream, EventStream, StreamForm
from shoal.gateway.request_log import RequestRecord
from shoal.gateway.sessions import SessionContext
from shoal.gateway.token_tree import Conversation, TokenTree
from shoal.interfaces import ModelServer
from shoal.net.server import PAGE_HEADERS, disconnected, json
from shoal.types import FinishReason

EVERY = 8
"""Tokens between two looks for a stop string, where no stream wants them sooner."""
NO_TREE = TokenTree()
HOME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{model} - Shoal</title>
<link rel="stylesheet" href="look.css">
<link rel="icon" href="data:,">
</head>
<body>
<main>
<h1>{model}</h1>
<p>This server answers OpenAI and Anthropic clients. Context: {longest} tokens.</p>
<div class="scroll" tabindex="0" role="region" aria-label="Addresses"><table><tbody>
<tr><th scope="row">OpenAI base URL</th><td><code>{url}</code></td></tr>
<tr><th scope="row">Anthropic base URL</th><td><code>{url}</code> without <code>/v1</code></td></tr>
<tr><th scope="row">Model</th><td><code>{model}</code></td></tr>
</tbody></table></div>
<pre class="scroll" tabindex="0">curl {url}/chat/completions -H 'Content-Type: application/json' -d '{asked}'</pre>
<p>A server beyond loopback wants the key that <code>shoal serve</code> printed.</p>
</main>
</body>
</html>
"""
TEXT_ID = "cmpl-"
"""Beginning of the ids of text completions."""


@dataclass(frozen=True, slots=True)
class PlainJob:
    """A plain request with its choices."""

    answering: Answering
    prompts: tuple[tuple[int, ...], ...]
    choices: tuple[Choice, ...]


Reader: TypeAlias = Callable[[], AnswerText]
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
        model, url = escape(self.model), escape(f"{http.base_url}v1")
        asked = json_text({"model": self.model, "messages": [{"role": "user", "content": "Hello"}]})
        page = HOME.format(model=model, url=url, longest=self.context.max_model_len, asked=escape(asked, quote=False))
        return Response(page, 200, PAGE_HEADERS, "text/html")

    async def chat(self, http: Request, data: bytes, record: RequestRecord, late: LateError) -> Response:
        """Answers a chat request. Raises a `ShoalError`."""
        body, options = chat_request(data)
        job = await self._conversation(chat_ask(body, NO_TREE).conversation, options, "chatcmpl-")
        if options.stream:
            return await self._streamed(job, CompletionStream(job.answering, chat=True), record, late)
        return await self._body(job, http, record)

    async def text(self, http: Request, data: bytes, record: RequestRecord, late: LateError) -> Response:
        """Answers a text request. Raises a `ShoalError`."""
        body, options = text_request(data)
        renderer, prompts = self.context.renderer, []
        for one in prompts_of(body):
            said = await self.context.computed(len(one), renderer.token_ids, one) if isinstance(one, str) else one
            prompts.append(tuple(said))
        read = partial(AnswerText, renderer, options.stops, chat=False)
        job = self._job(options, prompts, read, TEXT_ID)
        if options.stream:
            return await self._streamed(job, CompletionStream(job.answering, chat=False), record, late)
        return await self._body(job, http, record)

    async def events(self, dialect: Dialect[R], request: R, record: RequestRecord, late: LateError) -> Response:
        """Streams the answer to a request of an API with named events, token by token. Raises a `ShoalError`."""
        job = await self._conversation(dialect.ask(request, NO_TREE).conversation, plain_options(request), "")
        return await self._streamed(job, EventStream(job.answering, dialect, request), record, late)

    async def _conversation(self, conversation: Conversation, options: PlainOptions, prefix: str) -> PlainJob:
        prompt = tuple(await self.context.rendered(conversation))
        tools, template = bool(conversation.tools), conversation.template
        read = partial(AnswerText, self.context.renderer, options.stops, chat=True, tools=tools, template=template)
        return self._job(options, [prompt], read, prefix)

    def _job(self, options: PlainOptions, prompts: Sequence[tuple[int, ...]], read: Reader, prefix: str) -> PlainJob:
        if (many := len(prompts) * options.n) > MOST_CHOICES:
            raise SessionError(f"prompt: expected at most {MOST_CHOICES} choices of all prompts together, got {many}")
        longest = self.context.max_model_len
        for prompt in prompts:
            if not 0 < len(prompt) < longest:
                where = "prompt" if prefix == TEXT_ID else "messages"
                why = f"expected 1 to {longest - 1} tokens, for a context of {longest}; got {len(prompt)}"
                raise ContextOverflow(f"{where}: {why}")
        name = f"{prefix}{secrets.token_hex(12)}"
        answering = Answering(name, self.model, int(time.time()), options, self.context.renderer.token_bytes)
        repeated = [prompt for prompt in prompts for _ in range(options.n)]
        choices = tuple(Choice(index, prompt, read()) for index, prompt in enumerate(repeated))
        return PlainJob(answering, tuple(prompts), choices)

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
        record.finish = ",".join(
            sorted({"stop" if one.text.stopped else one.finish_reason or "unfinished" for one in job.choices})
        )
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
        every = 1 if options.stream else EVERY if options.stops else 0
        stops, room = self.context.renderer.stop_token_ids, self.context.max_model_len - len(choice.prompt_ids)
        sampling = replace(
            options.sampling,
            max_tokens=min(options.max_tokens or room, room),
            stop_token_ids=(*stops, *options.sampling.stop_token_ids),
            seed=options.seed(choice.index % options.n),
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
