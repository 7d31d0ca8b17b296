"""Model server of the gateway: answers chat and text completions without a session, token by token where asked.

Each choice is an answer of its own at the engine, which computes an equal prompt once. A stop string ends the answer at
the engine too, and so does a client that disconnects: nobody trains on these tokens.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from shoal.errors import ContextOverflow, EngineUnavailable, SessionError, ShoalError
from shoal.gateway.answer_text import AnswerText
from shoal.gateway.chat import chat_ask
from shoal.gateway.dialects import Body
from shoal.gateway.plain_answers import (
    Answering,
    Choice,
    chat_choice,
    chat_delta,
    chat_end,
    text_choice,
    text_delta,
    text_end,
)
from shoal.gateway.plain_requests import MOST_CHOICES, PlainOptions, chat_request, prompts_of, text_request
from shoal.gateway.request_log import RequestRecord
from shoal.gateway.sessions import SessionContext
from shoal.gateway.token_tree import TokenTree
from shoal.interfaces import ModelServer
from shoal.net.server import disconnected, json
from shoal.types import FinishReason

EVERY = 8
"""Tokens between two looks for a stop string, where no stream wants them sooner."""
NO_TREE = TokenTree()


@dataclass(frozen=True, slots=True)
class PlainJob:
    """A plain request with its choices."""

    answering: Answering
    prompts: tuple[tuple[int, ...], ...]
    choices: tuple[Choice, ...]
    chat: bool


Reader: TypeAlias = Callable[[], AnswerText]
LateError: TypeAlias = Callable[[ShoalError], Body]
"""Function from an error to the body that reports it in a stream."""


@dataclass(frozen=True, slots=True)
class PlainServer:
    """Answers plain requests with the model behind `server`."""

    server: ModelServer
    context: SessionContext
    model: str
    keep_alive_s: float

    async def chat(self, http: Request, data: bytes, record: RequestRecord, late: LateError) -> Response:
        """Answers a chat request. Raises a `ShoalError`."""
        body, options = chat_request(data)
        conversation = chat_ask(body, NO_TREE).conversation
        prompt = tuple(await self.context.rendered(conversation))
        read = partial(
            AnswerText,
            self.context.renderer,
            options.stops,
            chat=True,
            tools=bool(conversation.tools),
            template=conversation.template,
        )
        return await self._response(self._job(options, [prompt], read, chat=True), http, record, late)

    async def text(self, http: Request, data: bytes, record: RequestRecord, late: LateError) -> Response:
        """Answers a text request. Raises a `ShoalError`."""
        body, options = text_request(data)
        renderer, prompts = self.context.renderer, []
        for one in prompts_of(body):
            said = await self.context.computed(len(one), renderer.token_ids, one) if isinstance(one, str) else one
            prompts.append(tuple(said))
        read = partial(AnswerText, renderer, options.stops, chat=False)
        return await self._response(self._job(options, prompts, read, chat=False), http, record, late)

    def _job(self, options: PlainOptions, prompts: Sequence[tuple[int, ...]], read: Reader, *, chat: bool) -> PlainJob:
        if (many := len(prompts) * options.n) > MOST_CHOICES:
            raise SessionError(f"prompt: expected at most {MOST_CHOICES} choices of all prompts together, got {many}")
        longest = self.context.max_model_len
        for prompt in prompts:
            if not 0 < len(prompt) < longest:
                where = "messages" if chat else "prompt"
                why = f"expected 1 to {longest - 1} tokens, for a context of {longest}; got {len(prompt)}"
                raise ContextOverflow(f"{where}: {why}")
        name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        answering = Answering(name, self.model, int(time.time()), options, self.context.renderer.token_bytes)
        repeated = [prompt for prompt in prompts for _ in range(options.n)]
        choices = tuple(Choice(index, prompt, read()) for index, prompt in enumerate(repeated))
        return PlainJob(answering, tuple(prompts), choices, chat)

    async def _response(self, job: PlainJob, http: Request, record: RequestRecord, late: LateError) -> Response:
        record.id, record.prompt_tokens = job.answering.id, sum(map(len, job.prompts))
        if job.answering.options.stream:
            chunks = self._chunks(job, record, late)
            first = await anext(chunks)  # an error before the first token has a status of its own
            return StreamingResponse(_after(first, chunks), media_type="text/event-stream")
        await self._all_answered(job, http, record)
        choice_of = chat_choice if job.chat else text_choice
        choices = [choice_of(job.answering, choice) for choice in job.choices]
        head = job.answering.head("chat.completion" if job.chat else "text_completion")
        return json({**head, "choices": choices, "usage": job.answering.usage(job.choices, job.prompts)})

    async def _all_answered(self, job: PlainJob, http: Request, record: RequestRecord) -> None:
        """Waits for all choices, whose answers end when one fails or the client disconnects."""
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

    async def _chunks(self, job: PlainJob, record: RequestRecord, late: LateError) -> AsyncIterator[bytes]:
        """Events of a stream: comments while nothing comes, then the chunks of all choices as they come."""
        queue: asyncio.Queue[Choice | ShoalError | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._feed(choice, job, queue), name="plain choice") for choice in job.choices]
        shown = {choice.index: ("", "") for choice in job.choices}
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
                    yield _event(late(came))
                    return
                began = True
                if came is None:
                    running -= 1
                    continue
                if not record.first_token_s:
                    record.first_token_s = time.monotonic() - began_s
                    for chunk in _opening(job):
                        yield chunk
                for chunk in _news(job, came, shown):
                    yield chunk
            if job.answering.options.usage:
                usage = job.answering.usage(job.choices, job.prompts)
                yield _event({**_chunk_head(job), "choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
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


def _event(body: Body) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _chunk_head(job: PlainJob) -> Body:
    return job.answering.head("chat.completion.chunk" if job.chat else "text_completion")


def _opening(job: PlainJob) -> Iterator[bytes]:
    """First chunk of each choice of a chat."""
    for choice in job.choices if job.chat else ():
        delta: Body = {"role": "assistant", "content": ""}
        yield _event({**_chunk_head(job), "choices": [{"index": choice.index, "delta": delta, "finish_reason": None}]})


def _news(job: PlainJob, choice: Choice, shown: dict[int, tuple[str, str]]) -> Iterator[bytes]:
    """Chunks with what a choice shows more than before, and with its end."""
    reasoning, content = shown[choice.index]
    shown[choice.index] = choice.text.reasoning, choice.text.content
    thought, said = choice.text.reasoning[len(reasoning) :], choice.text.content[len(content) :]
    bodies: list[Body] = []
    if thought or said:
        delta = (
            chat_delta(job.answering, choice, thought, said) if job.chat else text_delta(job.answering, choice, said)
        )
        bodies.append(delta)
    if choice.finish_reason is not None:
        bodies += chat_end(job.answering, choice) if job.chat else [text_end(job.answering, choice)]
    for body in bodies:
        yield _event({**_chunk_head(job), "choices": [body]})
