"""Bodies and chunks that answer plain requests, in the forms of OpenAI's chat and text completions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shoal.gateway.answer_text import AnswerText
from shoal.gateway.conversation import minted_id
from shoal.gateway.dialects import Body
from shoal.interfaces import LogitRules, ServedToken
from shoal.net.chat import wire_of, wire_of_call
from shoal.types import FinishReason, Json, Message, Role, ToolCall, seed_for


@dataclass(frozen=True, slots=True)
class PlainOptions:
    """Options of a plain request; its prompts and the ends of its answers are elsewhere."""

    n: int
    max_tokens: int | None
    """None for as many as the context has room for; 0 only scores the prompt."""
    seed: int | None
    rules: LogitRules
    logprobs: bool
    echo: bool
    """Whether the prompt comes before the answer."""
    usage: bool
    """Whether a stream ends with token counts."""
    token_ids: bool
    """Whether the client wants the tokens themselves."""

    def seed_of(self, index: int) -> int | None:
        """Seed of one choice: the request's own for the first, so that it is what it would be alone."""
        return self.seed if self.seed is None or index == 0 else seed_for("choice", self.seed, index)


@dataclass(slots=True)
class Choice:
    """One answer under way."""

    index: int
    prompt_ids: tuple[int, ...]
    text: AnswerText
    prompt: tuple[ServedToken, ...] = ()
    """Tokens of the prompt after its first, where it is echoed with logprobs."""
    tokens: list[ServedToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    shown: int = 0
    """Tokens whose logprobs a stream has sent."""

    @property
    def kept(self) -> list[ServedToken]:
        """Tokens of the text, without the stop string and what follows it."""
        return self.tokens[: self.text.shown()] if self.text.stopped else self.tokens


@dataclass(frozen=True, slots=True)
class Answering:
    """Fields that all choices of a request share."""

    id: str
    model: str
    created: int
    """Time of the request in seconds since 1970."""
    options: PlainOptions
    token_bytes: Callable[[int], bytes]

    def usage(self, choices: Sequence[Choice], prompts: Sequence[tuple[int, ...]]) -> Body:
        """Token counts; each prompt counts once."""
        prompt, sampled = sum(map(len, prompts)), sum(len(choice.tokens) for choice in choices)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def head(self, kind: str) -> Body:
        """Fields with which every body and chunk begins."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def spelt(self, token: int) -> str:
        """Text of one token; a piece of a character is a replacement character."""
        return self.token_bytes(token).decode(errors="replace")


def chat_choice(answering: Answering, choice: Choice) -> Body:
    """Choice of a chat completion."""
    message = message_of(answering, choice)
    shown: Body = {**wire_of(message), "refusal": None}
    if message.tool_calls and not message.content:
        shown["content"] = None
    return {"index": choice.index, "message": shown, **_end(answering, choice, message, chat_logprobs)}


def chat_delta(answering: Answering, choice: Choice, reasoning: str, content: str) -> Body:
    """Choice of a chunk with new text."""
    delta: Body = {name: text for name, text in (("reasoning_content", reasoning), ("content", content)) if text}
    logprobs = chat_logprobs(answering, choice, _unsent(choice)) if answering.options.logprobs else None
    return {"index": choice.index, "delta": delta, "finish_reason": None, "logprobs": logprobs}


def chat_end(answering: Answering, choice: Choice) -> Iterator[Body]:
    """Choices of the last chunks: tool calls, then the finish reason."""
    message = message_of(answering, choice)
    for i, call in enumerate(message.tool_calls):
        delta: Body = {"tool_calls": [{"index": i, **wire_of_call(call)}]}
        yield {"index": choice.index, "delta": delta, "finish_reason": None}
    rest = _unsent(choice)
    end = _end(answering, choice, message, chat_logprobs)
    logprobs = chat_logprobs(answering, choice, rest) if answering.options.logprobs and rest else None
    yield {"index": choice.index, "delta": {}, **end, "logprobs": logprobs}


def text_choice(answering: Answering, choice: Choice) -> Body:
    """Choice of a text completion; an echoed prompt comes before the answer."""
    text, options = choice.text.content, answering.options
    if options.echo:
        text = b"".join(map(answering.token_bytes, choice.prompt_ids)).decode(errors="replace") + text
    return {"index": choice.index, "text": text, **_end(answering, choice, None, text_logprobs)}


def text_delta(answering: Answering, choice: Choice, content: str) -> Body:
    """Choice of a chunk with new text."""
    logprobs = text_logprobs(answering, choice, _unsent(choice)) if answering.options.logprobs else None
    return {"index": choice.index, "text": content, "finish_reason": None, "logprobs": logprobs}


def text_end(answering: Answering, choice: Choice) -> Body:
    """Choice of the last chunk."""
    rest = _unsent(choice)
    logprobs = text_logprobs(answering, choice, rest) if answering.options.logprobs and rest else None
    return {"index": choice.index, "text": "", **_end(answering, choice, None, text_logprobs), "logprobs": logprobs}


def chat_logprobs(answering: Answering, choice: Choice, tokens: Sequence[ServedToken]) -> Body:
    """Logprobs in the form of chat completions."""

    def entry(token: int, logprob: float) -> Body:
        spelling: list[Json] = list(answering.token_bytes(token))
        return {"token": answering.spelt(token), "logprob": logprob, "bytes": spelling}

    content: list[Json] = [
        {**entry(one.id, one.logprob), "top_logprobs": [entry(*other) for other in one.top]} for one in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(answering: Answering, choice: Choice, tokens: Sequence[ServedToken]) -> Body:
    """Logprobs in the form of text completions; an echoed prompt's first token has none."""
    first = choice.prompt_ids[:1] if answering.options.echo else ()
    known = [*(choice.prompt if first else ()), *tokens]
    texts = [answering.spelt(token) for token in (*first, *(one.id for one in known))]
    offsets, at = list[Json](), 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    tops: list[Json] = [_top(answering, one) for one in known]
    nothing: list[Json] = [None] * len(first)
    logprobs: list[Json] = [one.logprob for one in known]
    return {
        "tokens": list(texts),
        "token_logprobs": nothing + logprobs,
        "top_logprobs": nothing + tops if answering.options.rules.top else None,
        "text_offset": offsets,
    }


def _top(answering: Answering, one: ServedToken) -> Json:
    """Most likely tokens by text, with the token itself; of equal texts the likelier counts."""
    found: dict[str, Json] = {}
    for token, logprob in (*one.top, (one.id, one.logprob)):
        found.setdefault(answering.spelt(token), logprob)
    return found


def _unsent(choice: Choice) -> list[ServedToken]:
    """Tokens whose logprobs a stream has not sent yet."""
    rest = choice.kept[choice.shown :]
    choice.shown += len(rest)
    return rest


def message_of(answering: Answering, choice: Choice) -> Message:
    """Answer so far, with the tool calls of a whole one."""
    text, answer = choice.text, choice.text.answer
    calls = () if answer is None else answer.calls
    named = (ToolCall(minted_id(answering.id, choice.index, i), one.name, one.arguments) for i, one in enumerate(calls))
    return Message(Role.ASSISTANT, text.content, tuple(named), reasoning=text.reasoning)


def _end(
    answering: Answering,
    choice: Choice,
    message: Message | None,
    logprobs: Callable[[Answering, Choice, Sequence[ServedToken]], Body],
) -> Body:
    assert choice.finish_reason is not None
    reason = choice.finish_reason.value
    answer, asked = choice.text.answer, answering.options.token_ids
    return {
        "finish_reason": "tool_calls" if message and message.tool_calls and reason == "stop" else reason,
        "logprobs": logprobs(answering, choice, choice.kept) if answering.options.logprobs else None,
        **({"token_ids": [one.id for one in choice.tokens]} if asked else {}),
        **({"prompt_token_ids": list(choice.prompt_ids)} if asked else {}),
        **({"ill_formed": True} if answer is not None and answer.ill_formed else {}),
    }
