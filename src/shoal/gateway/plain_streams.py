"""Streams of plain requests: chunks of OpenAI's completions, and the named events of other APIs, as tokens come."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Generic, Protocol

from shoal.gateway.dialects import Body, Dialect, R, Reply, event_bytes
from shoal.gateway.plain_answers import Answering, Choice, chat_delta, chat_end, message_of, text_delta, text_end
from shoal.gateway.token_tree import Generation
from shoal.types import Completion, FinishReason

OPENING = ("message_start", "response.created", "response.in_progress")
"""Types of the events before an answer's first text."""
DELTAS = ("text", "thinking", "partial_json")
"""Names of the texts that grow in Anthropic's deltas."""


class StreamForm(Protocol):
    """Form in which a stream shows the choices of one request."""

    def opening(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        """Events before the first text."""

    def news(self, choice: Choice) -> Iterator[bytes]:
        """Events with what a choice has more than before, and with its end."""

    def end(self, choices: Sequence[Choice], prompts: Sequence[tuple[int, ...]]) -> Iterator[bytes]:
        """Events after the end of all choices."""


class CompletionStream:
    """Chunks of chat and text completions."""

    def __init__(self, answering: Answering, *, chat: bool) -> None:
        self._answering, self._chat = answering, chat
        self._head = answering.head("chat.completion.chunk" if chat else "text_completion")
        self._shown: dict[int, tuple[str, str]] = {}

    def opening(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        """First chunk of each choice of a chat."""
        for choice in choices if self._chat else ():
            delta: Body = {"role": "assistant", "content": ""}
            yield self._chunk({"index": choice.index, "delta": delta, "finish_reason": None})

    def news(self, choice: Choice) -> Iterator[bytes]:
        """Chunks with new text, and the last ones of a choice."""
        reasoning, content = self._shown.get(choice.index, ("", ""))
        self._shown[choice.index] = choice.text.reasoning, choice.text.content
        thought, said = choice.text.reasoning[len(reasoning) :], choice.text.content[len(content) :]
        if thought or said:
            delta = (
                chat_delta(self._answering, choice, thought, said)
                if self._chat
                else text_delta(self._answering, choice, said)
            )
            yield self._chunk(delta)
        if choice.finish_reason is not None:
            ends = chat_end(self._answering, choice) if self._chat else [text_end(self._answering, choice)]
            yield from map(self._chunk, ends)

    def end(self, choices: Sequence[Choice], prompts: Sequence[tuple[int, ...]]) -> Iterator[bytes]:
        """Token counts, if the client asked for them, and the mark of the end."""
        if self._answering.options.usage:
            yield event_bytes({**self._head, "choices": [], "usage": self._answering.usage(choices, prompts)})
        yield b"data: [DONE]\n\n"

    def _chunk(self, choice: Body) -> bytes:
        return event_bytes({**self._head, "choices": [choice]})


class EventStream(Generic[R]):
    """Named events of one answer: those of the whole answer, whose deltas come in pieces.

    The events of an answer so far are those of the whole one up to its newest delta, since its text only grows.
    """

    def __init__(self, answering: Answering, dialect: Dialect[R], request: R) -> None:
        self._answering, self._dialect, self._request = answering, dialect, request
        self._sent = 0  # events sent whole
        self._shown = 0  # characters sent of the next one, a delta
        self._number = 0

    def opening(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        """First events, which have no text."""
        events = self._dialect.events([self._reply(choices[0])])
        for event in takewhile(lambda event: event["type"] in OPENING, events):
            self._sent += 1
            yield self._numbered(event)

    def news(self, choice: Choice) -> Iterator[bytes]:
        """Events with new text; those of the end once the choice has ended."""
        events = list(self._dialect.events([self._reply(choice)]))
        ended = choice.finish_reason is not None
        newest = max((at for at, event in enumerate(events) if _delta_text(event)), default=-1)
        for at in range(self._sent, len(events) if ended else newest + 1):
            event, text = events[at], _delta_text(events[at])
            if text is not None and at == self._sent and self._shown:
                if not (text := text[self._shown :]):
                    continue
                event = _with_delta_text(event, text)
            yield self._numbered(event)
        if newest >= 0:
            self._sent, self._shown = newest, len(_delta_text(events[newest]) or "")

    def end(self, choices: Sequence[Choice], prompts: Sequence[tuple[int, ...]]) -> Iterator[bytes]:
        """Nothing: the last event is the mark of the end."""
        return iter(())

    def _numbered(self, event: Body) -> bytes:
        """Event as bytes; deltas in pieces make more events than the whole answer has."""
        if "sequence_number" in event:
            event = {**event, "sequence_number": self._number}
        self._number += 1
        return event_bytes(event, named=True)

    def _reply(self, choice: Choice) -> Reply[R]:
        """Answer so far, in the form of one that ended."""
        ids = tuple(one.id for one in choice.tokens)
        completion = Completion(
            ids,
            tuple(min(one.logprob, 0.0) for one in choice.tokens),
            (0,) * len(ids),
            choice.finish_reason or FinishReason.STOP,
        )
        answer = choice.text.answer
        message = message_of(self._answering, choice)
        generation = Generation(
            id=0,
            parent=None,
            rendered_ids=choice.prompt_ids,
            completion=completion,
            tail=(),
            message=message,
            said=message,
            continues=False,
            digest="",
            ill_formed=answer is not None and answer.ill_formed,
            stop=choice.text.stop,
        )
        return Reply(self._request, generation, choice.prompt_ids, self._answering.created, self._answering.id)


def _delta_text(event: Body) -> str | None:
    """Text that grows in an event; None in events that come whole."""
    delta = event.get("delta")
    if isinstance(delta, dict):
        delta = next((delta[name] for name in DELTAS if name in delta), None)
    return delta if isinstance(delta, str) else None


def _with_delta_text(event: Body, text: str) -> Body:
    delta = event["delta"]
    if isinstance(delta, dict):
        return {**event, "delta": {**delta, **{name: text for name in DELTAS if name in delta}}}
    return {**event, "delta": text}
