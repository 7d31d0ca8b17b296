"""Sessions: each answer extends a token tree; threads render text, and the engine samples outside the lock."""

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec

from shoal.errors import ContextOverflow, EngineUnavailable, SessionError
from shoal.gateway.answer_text import AnswerText
from shoal.gateway.conversation import Conversation, minted_id
from shoal.gateway.grammars import answer_grammar
from shoal.gateway.token_tree import Attachment, Cause, Generation, HistoryPolicy, OpenGeneration, TokenTree
from shoal.interfaces import Engine
from shoal.types import Completion, FinishReason, Message, Role, Sampling, ToolCall, seed_for

if TYPE_CHECKING:
    from shoal.model.chat_template import ChatRenderer

LATENCIES_KEPT = 4096
INLINE_CHARACTERS = 2048
"""Characters up to which tokenising takes less time than a thread that competes for the interpreter."""
NO_MESSAGES = Conversation(())
FIRST_PIECE = 64
"""Tokens of the first piece of an answer that may end before its stop token; each later piece doubles it."""
ENDED = "session: it has ended; open a new one"

P = ParamSpec("P")
T = TypeVar("T")


class SessionOver(SessionError):
    """Error of a session that has ended or reached one of its limits (HTTP 410)."""

    http_status = 410


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one session."""

    generations: int = 256
    drawn_tokens: int = 1 << 20
    age_s: float = 3600.0


class OpenRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/sessions`."""

    sampling: Sampling | None = None
    """Sampling parameters that win over a client's, except that the client may ask for fewer tokens."""
    limits: SessionLimits = SessionLimits()
    history_policy: HistoryPolicy = HistoryPolicy.PRESERVE


DEFAULTS = OpenRequest()


class SamplingRequest(msgspec.Struct, kw_only=True):
    """Sampling parameters that a client asks for; None was not asked for."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: list[int] | None = None

    def sampling(self, most: int, stop_token_ids: tuple[int, ...]) -> Sampling:
        """Sampling of at most so many tokens; all that was not asked for is off. Raises `SessionError`."""
        given = {
            name: value for name in ("temperature", "top_p", "min_p") if (value := getattr(self, name)) is not None
        }
        stops = (*stop_token_ids, *(self.stop_token_ids or ()))
        try:
            return Sampling(most, top_k=max(self.top_k or 0, 0), stop_token_ids=stops, seed=self.seed, **given)
        except ValueError as error:
            raise SessionError(str(error)) from error


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Request for one answer, of any API."""

    conversation: Conversation = NO_MESSAGES
    sampling: SamplingRequest = field(default_factory=SamplingRequest)
    digest: str = ""
    is_retry: bool = False
    prompt: str | tuple[int, ...] | None = None
    """Prompt as text or tokens, in place of a conversation."""
    stops: tuple[str, ...] = ()
    """Texts that end the answer."""
    one_call: bool = False
    """Whether the answer ends after its first tool call."""
    schema: str = ""
    """JSON Schema that the answer satisfies; empty for none."""
    wanted: tuple[str, ...] = ()
    """Names of the tools of which the answer calls one; empty where it may do without."""


@dataclass(frozen=True, slots=True)
class SessionContext:
    """Parts that all sessions share."""

    engine: Engine
    renderer: "ChatRenderer"
    max_model_len: int
    pool: ThreadPoolExecutor
    clock: Callable[[], float]
    tasks: set[asyncio.Task[Generation]] = field(default_factory=set)
    counted: Counter[str] = field(default_factory=Counter)
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES_KEPT))

    async def computed(self, size: int, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Result of a function on about `size` characters; long texts run in a thread to keep the event loop free."""
        if size <= INLINE_CHARACTERS:
            return function(*args, **options)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.pool, lambda: function(*args, **options))

    async def rendered(self, conversation: Conversation) -> list[int]:
        """Tokens of a whole conversation, up to where the answer goes on. Raises `SessionError`."""
        return await self.computed(_size(conversation.messages, conversation.tools), self._whole, conversation)

    def _whole(self, conversation: Conversation) -> list[int]:
        self.check(conversation)
        self.check_length("messages", sum(len(message.content) for message in conversation.messages))
        render = self.renderer.prompt_ids
        whole = render(conversation.messages, conversation.tools, conversation.template)
        return [*whole, *self.renderer.token_ids(conversation.begun)]

    def check(self, conversation: Conversation) -> None:
        """Raises `SessionError` for a conversation that the model's chat template cannot show."""
        if not self.renderer.has_template:
            raise SessionError(
                "messages: the model has no chat template; send its text to /v1/completions as `prompt`, or put a "
                "chat_template into the model's tokenizer_config.json"
            )
        if conversation.tools and not self.renderer.takes_tools:
            raise SessionError("tools: expected none, the model's chat template shows no tools; leave them out")
        if conversation.begun and (self.renderer.in_channels or self.renderer.opens_thought(conversation.template)):
            raise SessionError(
                "messages: expected a user's or tool's message as the last, since the model begins each answer with a "
                "thought and no answer can be begun for it; leave the last message out"
            )

    def check_length(self, field: str, characters: int) -> None:
        """Raises `ContextOverflow` for a text that cannot fit whatever its tokens are, before it is tokenised."""
        least = characters // self.renderer.longest_token
        if least >= self.max_model_len:
            why = f"expected at most {self.max_model_len - 1} tokens, got at least {least} in {characters} characters"
            raise ContextOverflow(f"{field}: {why}")

    def reader(self, ask: AnswerRequest, after: Message | None = None) -> AnswerText:
        """Reader of the answer to a request; `after` is the earlier part of the answer."""
        conversation = ask.conversation
        begun = Message(Role.ASSISTANT, conversation.begun) if conversation.begun else None
        return AnswerText(
            self.renderer,
            ask.stops,
            chat=ask.prompt is None,
            tools=bool(conversation.tools),
            template=conversation.template,
            one_call=ask.one_call,
            after=after or begun,
        )

    def grammar(self, ask: AnswerRequest) -> str:
        """Grammar of the answer to a request; empty for none. Raises `SessionError`."""
        tools, template = ask.conversation.tools, ask.conversation.template
        return answer_grammar(self.renderer, ask.schema, ask.wanted, tools, template, one_call=ask.one_call)

    async def prompt_ids(self, ask: AnswerRequest) -> tuple[int, ...]:
        """Tokens of a request by itself. Raises `SessionError`."""
        prompt = ask.prompt
        if prompt is None:
            prompt = tuple(await self.rendered(ask.conversation))
        elif isinstance(prompt, str):
            self.check_length("prompt", len(prompt))
            prompt = tuple(await self.computed(len(prompt), partial(self.renderer.token_ids, begins=True), prompt))
        if not 0 < len(prompt) < self.max_model_len:
            where, longest = "messages" if ask.prompt is None else "prompt", self.max_model_len
            why = f"expected 1 to {longest - 1} tokens, for a context of {longest}; got {len(prompt)}"
            raise ContextOverflow(f"{where}: {why}")
        return prompt


class Session:
    """One conversation of one client, with all its branches.

    Invariant: sampled tokens enter the tree before a client sees them. A client that disconnects stops nothing: its
    retry finds the generation under way, or the answer.
    """

    def __init__(self, context: SessionContext, asked: OpenRequest, priority: int = 0) -> None:
        """`priority` is the priority of its requests."""
        self.token = secrets.token_urlsafe(18)
        self.tree = TokenTree(asked.history_policy, secrets.token_hex(8))
        self.ended = ""
        """Reason why the session answers no more; empty while it answers."""
        self.tokens_held = 0
        self.used_s = context.clock()
        """Time of the last request or answer."""
        self._context = context
        self._sampling = asked.sampling
        self._limits = asked.limits
        self._priority = priority
        self._began_s = context.clock()
        self._lock = asyncio.Lock()
        self._generating: dict[int, asyncio.Task[Generation]] = {}

    async def generation(self, ask: AnswerRequest) -> Generation:
        """Answers a request. Raises a `ShoalError`."""
        began_s = self._context.clock()
        async with self._lock:
            if self.ended:
                raise SessionOver(self.ended)
            found = self.tree.retried(ask.digest) if ask.is_retry else None
            if found is not None:
                self._context.counted["replays"] += 1
            if isinstance(found, Generation):
                return found
            if found is None:
                self._check_limits()  # tokens sampled before the limit can still be asked for again
            task = self._generating[found.id] if found is not None else self._begin(await self._open(ask), ask)
        generation = await asyncio.shield(task)
        self.used_s = self._context.clock()
        self._context.latencies_s.append(self.used_s - began_s)
        return generation

    @property
    def is_busy(self) -> bool:
        """Whether the session is rendering or sampling."""
        return bool(self._generating) or self._lock.locked()

    async def end(self, reason: str = ENDED) -> None:
        """Refuses new requests and waits for those under way."""
        async with self._lock:  # a request that is being rendered begins first
            self.ended = self.ended or reason
        await asyncio.gather(*self._generating.values(), return_exceptions=True)

    def _check_limits(self) -> None:
        sampled = self.tree.generations
        if len(sampled) + len(self.tree.calls) >= self._limits.generations:
            raise SessionOver(f"session: expected at most {self._limits.generations} generations, they are drawn")
        if sum(len(one.completion.token_ids) for one in sampled) >= self._limits.drawn_tokens:
            raise SessionOver(f"session: expected at most {self._limits.drawn_tokens} drawn tokens, they are drawn")
        if self._context.clock() - self._began_s > self._limits.age_s:
            raise SessionOver(f"session: expected requests within {self._limits.age_s:g} s of its begin")

    async def _open(self, ask: AnswerRequest) -> OpenGeneration:
        """Opens a generation, with its prompt rendered."""
        conversation = ask.conversation
        if ask.prompt is not None:  # a conversation of its own names it, once it is known to fit
            prompt = await self._context.prompt_ids(ask)
            named = Conversation((Message(Role.USER, repr(prompt)),), template="tokens")
            return self._fitting(self.tree.open(self.tree.attach(named), prompt, ask.digest))
        attachment = self.tree.attach(conversation)
        rendered = await self._bridge(attachment) if attachment.cause is None else None
        if rendered is None:
            if attachment.cause is None:
                attachment = self.tree.detached(attachment, Cause.NO_BRIDGE)
            rendered = await self._context.rendered(conversation)
        self._context.counted["bridges" if attachment.cause is None else f"forced_{attachment.cause}"] += 1
        return self._fitting(self.tree.open(attachment, rendered, ask.digest))

    async def _bridge(self, attachment: Attachment) -> list[int] | None:
        if attachment.continues:
            return []
        return await self._context.computed(
            _size(attachment.tail, attachment.conversation.tools), self._joint, attachment
        )

    def _joint(self, attachment: Attachment) -> list[int] | None:
        conversation, renderer = attachment.conversation, self._context.renderer
        self._context.check(conversation)
        self._context.check_length("messages", sum(len(message.content) for message in attachment.tail))
        bridge = renderer.bridge_ids(attachment.tail, conversation.tools, conversation.template)
        return None if bridge is None else [*bridge, *renderer.token_ids(conversation.begun)]

    def _fitting(self, call: OpenGeneration) -> OpenGeneration:
        length, longest = len(call.prompt_ids), self._context.max_model_len
        if 0 < length < longest:
            return call
        self.tree.cancel(call)
        self.tree.truncated = length >= longest
        raise ContextOverflow(f"messages: expected 1 to {longest - 1} tokens, for a context of {longest}; got {length}")

    def _begin(self, call: OpenGeneration, ask: AnswerRequest) -> asyncio.Task[Generation]:
        def settled(task: asyncio.Task[Generation]) -> None:
            self._generating.pop(call.id, None)
            self._context.tasks.discard(task)
            if not task.cancelled():
                task.exception()  # its waiters get the error

        task = asyncio.get_running_loop().create_task(self._generate(call, ask), name=f"session {self.token[:6]}")
        self._generating[call.id] = task
        self._context.tasks.add(task)
        task.add_done_callback(settled)
        return task

    async def _generate(self, call: OpenGeneration, ask: AnswerRequest) -> Generation:
        try:
            parent = call.attachment.parent if call.attachment.continues else None
            text = self._context.reader(ask, None if parent is None else self.tree.conversation(parent)[-1])
            completion = await self._sampled(call, self._sampling_of(call, ask), text)
        except BaseException:
            self.tree.cancel(call)
            raise
        answer = text.whole
        calls = tuple(
            ToolCall(minted_id(self.token, call.id, index), sampled.name, sampled.arguments)
            for index, sampled in enumerate(answer.calls)
        )
        message = Message(Role.ASSISTANT, answer.content, calls, reasoning=answer.reasoning)
        self._context.counted["drawn_tokens"] += len(completion.token_ids)
        self.tokens_held += len(call.rendered_ids) + len(completion.token_ids)
        self.tree.truncated = False
        return self.tree.commit(call, completion, message, ill_formed=answer.ill_formed, stop=text.stop)

    async def _sampled(self, call: OpenGeneration, sampling: Sampling, text: AnswerText) -> Completion:
        """Samples an answer up to its stop token, stop text or first call.

        Only a reader of the text sees where a stop text ends, so such an answer is sampled in pieces, and the tokens
        behind its end are dropped. The end depends on tokens before it alone: the kept ones are sampled as ever.
        """
        whole, left = Completion((), (), (), FinishReason.LENGTH), sampling
        piece = FIRST_PIECE if text.watches else sampling.max_tokens
        while True:
            asked = replace(left, max_tokens=min(left.max_tokens, piece))
            (more,) = await self._context.engine.generate(
                call.prompt_ids + whole.token_ids, asked, priority=self._priority, session=self.token
            )
            if more.finish_reason is FinishReason.ABORT:
                raise EngineUnavailable("the engine aborted the answer")
            whole = whole.then(more)
            rest = sampling.rest(len(whole.token_ids))
            is_last = len(more.token_ids) < asked.max_tokens or more.finish_reason is FinishReason.STOP or rest is None
            await self._context.computed(4 * len(whole.token_ids), text.add, more.token_ids, last=is_last)
            if text.stopped:
                return _cut(whole, await self._context.computed(4 * len(whole.token_ids), text.kept), call)
            if rest is None or is_last:
                return whole
            left, piece = rest, 2 * piece

    def _sampling_of(self, call: OpenGeneration, ask: AnswerRequest) -> Sampling:
        """Sampling parameters of this generation. Raises `SessionError` for numbers out of range."""
        room = self._context.max_model_len - len(call.prompt_ids)
        stops = self._context.renderer.stop_token_ids
        own, client = self._sampling, ask.sampling
        most = room if client.max_tokens is None else min(client.max_tokens, room)
        made = client.sampling(most, stops)
        if own is not None:
            seed = None if own.seed is None else seed_for("session", own.seed, call.id)
            made = replace(
                own, max_tokens=min(most, own.max_tokens), stop_token_ids=own.stop_token_ids or stops, seed=seed
            )
        begun = len(self._context.renderer.token_ids(ask.conversation.begun)) + self.tree.begun_tokens(call.attachment)
        return replace(made, grammar=self._context.grammar(ask), begun=begun)


def _cut(whole: Completion, size: int, call: OpenGeneration) -> Completion:
    """First tokens of a completion, which end in a stop text."""
    experts = len(whole.routing) // max(1, len(call.prompt_ids) + len(whole.token_ids) - 1)
    return Completion(
        whole.token_ids[:size],
        whole.logprobs[:size],
        whole.versions[:size],
        FinishReason.STOP,
        whole.routing[: experts * (len(call.prompt_ids) + size - 1)],
        tuple(index for index in whole.forced if index < size),
    )


def _size(messages: tuple[Message, ...], tools: str) -> int:
    return len(tools) + sum(len(message.content) for message in messages)
