"""Streams of named events for OpenAI's responses and Anthropic's messages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Generic

from shoal.gateway.dialects import Body, R, Reply, event_bytes

OPENING = ("message_start", "response.created", "response.in_progress")
"""Types of the events before an answer's first text."""
DELTAS = ("text", "thinking", "partial_json")
"""Text fields of Anthropic's deltas."""


class EventStream(Generic[R]):
    """Named events of one answer, with deltas in pieces. Implements `StreamForm`.

    An answer's text only grows, so that up to the newest delta its events equal those of the complete answer.
    """

    def __init__(
        self, replies: Sequence[Reply[R]], events: Callable[[Reply[R]], Iterable[Body]], numbered: bool = False
    ) -> None:
        """`events` gives the events of an answer as if it ended now; `numbered` adds sequence numbers."""
        (self._reply,), self._events, self._is_numbered = replies, events, numbered
        self._sent = 0  # events sent whole
        self._shown = 0  # characters sent of the next one, a delta
        self._number = 0

    def opening(self) -> Iterator[bytes]:
        """First events, which have no text."""
        for event in takewhile(lambda event: event["type"] in OPENING, self._events(self._reply)):
            self._sent += 1
            yield self._numbered(event)

    def news(self, index: int) -> Iterator[bytes]:
        """Events with new text; those of the end once the answer has ended."""
        events = list(self._events(self._reply))
        ended = self._reply.finish_reason is not None
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

    def end(self) -> Iterator[bytes]:
        """Nothing: the last event marks the end."""
        return iter(())

    def _numbered(self, event: Body) -> bytes:
        """Event as bytes, numbered only here because pieces of deltas add events."""
        if self._is_numbered:
            event = {**event, "sequence_number": self._number}
        self._number += 1
        return event_bytes(event, named=True)


def _delta_text(event: Body) -> str | None:
    """Text of a delta; None for other events."""
    delta = event.get("delta")
    if isinstance(delta, dict):
        delta = next((delta[name] for name in DELTAS if name in delta), None)
    return delta if isinstance(delta, str) else None


def _with_delta_text(event: Body, text: str) -> Body:
    delta = event["delta"]
    if isinstance(delta, dict):
        return {**event, "delta": {**delta, **{name: text for name in DELTAS if name in delta}}}
    return {**event, "delta": text}
