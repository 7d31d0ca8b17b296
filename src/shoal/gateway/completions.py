"""Bodies and chunks of answers in the forms of OpenAI's chat and text completions, and of vLLM's tokens."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from shoal.gateway.chat import (
    ChatRequest,
    CompletionRequest,
    TextRequest,
    TokensRequest,
    chat_ask,
    each_text,
    text_ask,
    tokens_ask,
)
from shoal.gateway.dialects import Body, Dialect, R, Reply, event_bytes
from shoal.gateway.fields import rules_of
from shoal.interfaces import ServedToken
from shoal.net.chat import wire_of, wire_of_call
from shoal.types import Json

C = TypeVar("C", bound=CompletionRequest)


def chat_body(replies: Sequence[Reply[ChatRequest]]) -> Body:
    """Body of the answers to a chat request."""
    choices = list[Json]()
    for reply in replies:
        message = {**wire_of(reply.message), "refusal": None}
        if reply.message.tool_calls and not reply.message.content:
            message["content"] = None
        logprobs = _logprobs(reply, chat_logprobs)
        choices.append({"index": reply.index, "message": message, "logprobs": logprobs, **_end(reply)})
    return {**_head("chatcmpl", "chat.completion", replies[0]), "choices": choices, **_tail(replies)}


def text_body(replies: Sequence[Reply[TextRequest]]) -> Body:
    """Body of the answers to a text completion; an echoed prompt comes before its answer."""
    choices = list[Json]()
    for reply in replies:
        text = reply.message.content
        if reply.request.echo:
            text = b"".join(map(reply.spelt, reply.prompt_ids)).decode(errors="replace") + text
        tokens = {**_end(reply), **reply.prompt_fields}
        choices.append({"index": reply.index, "text": text, "logprobs": _logprobs(reply, text_logprobs), **tokens})
    return {**_head("cmpl", "text_completion", replies[0]), "choices": choices, **_tail(replies)}


def tokens_body(replies: Sequence[Reply[TokensRequest]]) -> Body:
    """Body of the answer to a prompt in tokens."""
    (reply,) = replies
    choice: Body = {
        "index": 0,
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
        "weight_versions": reply.spans,
        "logprobs": chat_logprobs(reply, 0, len(reply.token_ids)),
    }
    prompt: list[Json] = list(reply.prompt_ids)
    name = reply.request.request_id
    return {"request_id": name, "prompt_token_ids": prompt, "choices": [choice], "usage": usage(replies)}


class CompletionStream:
    """Chunks of chat and text completions. Implements `StreamForm`."""

    def __init__(self, replies: Sequence[Reply[C]], *, chat: bool) -> None:
        self._replies, self._chat = replies, chat
        kind = ("chatcmpl", "chat.completion.chunk") if chat else ("cmpl", "text_completion")
        self._head = _head(*kind, replies[0])
        self._shown = [("", "")] * len(replies)
        self._sent = [0] * len(replies)

    def opening(self) -> Iterator[bytes]:
        """First chunk of each choice of a chat."""
        for index in range(len(self._replies)) if self._chat else ():
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def news(self, index: int) -> Iterator[bytes]:
        """Chunks with new text, and the last ones of a choice: tool calls, then the finish reason."""
        reply, (thought, said) = self._replies[index], self._shown[index]
        message = reply.message
        self._shown[index] = message.reasoning, message.content
        reasoning, content = message.reasoning[len(thought) :], message.content[len(said) :]
        if reasoning or content:
            new: Body = {name: text for name, text in (("reasoning_content", reasoning), ("content", content)) if text}
            grown: Body = {"delta": new} if self._chat else {"text": content}
            yield self._chunk(index, {**grown, "finish_reason": None, "logprobs": self._news(index)})
        if reply.finish_reason is None:
            return
        for i, call in enumerate(message.tool_calls if self._chat else ()):
            called: Body = {"tool_calls": [{"index": i, **wire_of_call(call)}]}
            yield self._chunk(index, {"delta": called, "finish_reason": None})
        last: Body = {"delta": {}} if self._chat else {"text": ""}
        yield self._chunk(index, {**last, **_end(reply), "logprobs": self._news(index)}, **reply.prompt_fields)

    def end(self) -> Iterator[bytes]:
        """Token counts, if the client asked for them, and the end mark."""
        options = self._replies[0].request.stream_options
        if options and options.include_usage:
            yield event_bytes({**self._head, "choices": [], "usage": usage(self._replies)})
        yield b"data: [DONE]\n\n"

    def _news(self, index: int) -> Json:
        """Logprobs that the stream has not sent yet, if the client asked for them."""
        reply, start = self._replies[index], self._sent[index]
        self._sent[index] = len(reply.token_ids)
        if start == len(reply.token_ids):
            return None
        return _logprobs(reply, chat_logprobs if self._chat else text_logprobs, start)

    def _chunk(self, index: int, choice: Body, **more: Json) -> bytes:
        return event_bytes({**self._head, "choices": [{"index": index, **choice}], **more})


def _head(prefix: str, kind: str, reply: Reply[R]) -> Body:
    return {"id": f"{prefix}-{reply.id}", "object": kind, "created": reply.created, "model": reply.model}


def _tail(replies: Sequence[Reply[R]]) -> Body:
    return {"usage": usage(replies), **replies[0].prompt_fields}


def _end(reply: Reply[C]) -> Body:
    called = reply.stopped and bool(reply.message.tool_calls)
    reason = "tool_calls" if called else reply.finish_reason
    return {"finish_reason": reason, **reply.token_fields, **reply.flags}


def usage(replies: Sequence[Reply[R]]) -> Body:
    """Token counts; each prompt counts once."""
    prompt = sum(len(reply.prompt_ids) for reply in replies[:: replies[0].request.choices])
    sampled = sum(len(reply.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(reply: Reply[C], form: Callable[[Reply[C], int, int], Body], start: int = 0) -> Json:
    """Logprobs from index `start` on, if the client asked for them; those of a stop text are left out."""
    stop = len(reply.token_ids) - reply.answering.hidden
    return None if reply.request.top is None else form(reply, start, stop)


def chat_logprobs(reply: Reply[R], start: int, stop: int) -> Body:
    """Logprobs in the form of chat completions."""
    answer, trained = reply.answering, reply.session.is_trained

    def entry(token: int, logprob: float) -> Body:
        spelling = reply.spelt(token)
        text = f"token_id:{token}" if trained else spelling.decode(errors="replace")
        return {"token": text, "token_id": token, "logprob": logprob, "bytes": list(spelling)}

    rows = zip(answer.token_ids[start:stop], answer.logprobs[start:stop], strict=True)
    content: list[Json] = [
        {**entry(*row), "top_logprobs": [entry(*other) for other in tops]}
        for row, tops in zip(rows, answer.tops[start:stop] or [()] * (stop - start), strict=True)
    ]
    return {"content": content, "refusal": None}


def text_logprobs(reply: Reply[C], start: int, stop: int) -> Body:
    """Logprobs in the form of text completions; an echoed prompt's first token has none."""
    answer, trained = reply.answering, reply.session.is_trained

    def spelt(token: int) -> str:
        return f"token_id:{token}" if trained else reply.spelt(token).decode(errors="replace")

    tops = answer.tops[start:stop] or [()] * (stop - start)
    rows = zip(answer.token_ids[start:stop], answer.logprobs[start:stop], tops, strict=True)
    known = [*answer.scored, *(ServedToken(*row) for row in rows)]
    first = reply.prompt_ids[:1] if reply.request.echoes else ()
    texts = [spelt(token) for token in (*first, *(one.id for one in known))]
    offsets, at = list[Json](), 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    nothing: list[Json] = [None] * len(first)
    logprobs: list[Json] = [one.logprob for one in known]
    likely: list[Json] = [_likely(spelt, one) for one in known]
    return {
        "tokens": list(texts),
        "token_logprobs": nothing + logprobs,
        "top_logprobs": nothing + likely if reply.request.top else None,
        "text_offset": offsets,
    }


def _likely(spell: Callable[[int], str], one: ServedToken) -> Json:
    """Logprobs of the most likely tokens and of the token itself, by text; for equal texts the likelier wins."""
    found: dict[str, Json] = {}
    for token, logprob in (*one.top, (one.id, one.logprob)):
        found.setdefault(spell(token), logprob)
    return found


CHAT = Dialect(
    ChatRequest,
    rules_of("shared", "completion", "chat"),
    rules_of("trained"),
    chat_ask,
    chat_body,
    partial(CompletionStream, chat=True),
)
TEXT = Dialect(
    TextRequest,
    rules_of("shared", "completion", "text"),
    rules_of("trained", "trained_text"),
    text_ask,
    text_body,
    partial(CompletionStream, chat=False),
    each=each_text,
)
TOKENS = Dialect(TokensRequest, rules_of("shared", "tokens"), rules_of("trained"), tokens_ask, tokens_body)
