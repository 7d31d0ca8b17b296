"""Dialects: each API turns its requests into `AnswerRequest`s, and generations into its answers."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

import msgspec

from shoal.gateway.answer_request import AnswerRequest, SamplingRequest
from shoal.gateway.conversation import Conversation
from shoal.gateway.fields import FieldTable, Refusal, Rules, converted, fields_of, unicode
from shoal.types import FinishReason, Json, Message, Role

if TYPE_CHECKING:
    from shoal.gateway.answer_request import Answering
    from shoal.gateway.sessions import Session
    from shoal.gateway.token_tree import TokenTree


Body: TypeAlias = dict[str, Json]
ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
MOST_STOPS = 16
MOST_MESSAGES = 8192
"""Messages of a conversation: rendering more of them takes seconds, even if they are short."""


class ModelRequest(SamplingRequest, kw_only=True):
    """Fields that the requests of all APIs share."""

    model: str | None = ""
    stream: bool | None = False
    return_token_ids: bool | None = False

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return 1


class TextPart(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class AnswerFormat(msgspec.Struct):
    """Format of an answer's text."""

    type: str
    schema: dict[str, object] | None = None


R = TypeVar("R", bound=ModelRequest)


@dataclass(frozen=True, slots=True)
class Reply(Generic[R]):
    """Answer to a request, complete or partial."""

    request: R
    answering: "Answering"
    session: "Session"
    model: str
    """Name of the model."""
    created: int
    """Time of the request in seconds since 1970."""
    index: int = 0
    """Index among the answers to the request."""

    @property
    def id(self) -> str:
        """Id of the answer, unique among all sessions."""
        return f"{self.session.tree.name}-{self.answering.id}"

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Tokens before the answer."""
        return self.answering.prompt_ids

    @property
    def message(self) -> Message:
        """Answer as the client receives it, without the beginning that the client sent."""
        generation, text = self.answering.generation, self.answering.text
        return generation.said if generation else Message(Role.ASSISTANT, text.content, reasoning=text.reasoning)

    @property
    def token_ids(self) -> Sequence[int]:
        """Sampled tokens."""
        return self.answering.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the answer ended: `stop` or `length`, since an aborted answer is an error; None before."""
        return self.answering.generation.completion.finish_reason if self.answering.generation else None

    @property
    def stopped(self) -> bool:
        """Whether the model ended the answer itself."""
        return self.finish_reason is FinishReason.STOP

    @property
    def stop(self) -> str:
        """Stop text that ended the answer."""
        return self.answering.generation.stop if self.answering.generation else ""

    @property
    def flags(self) -> Body:
        """`ill_formed`, for an answer with a malformed tool call."""
        return {"ill_formed": True} if self.answering.generation and self.answering.generation.ill_formed else {}

    @property
    def prompt_fields(self) -> Body:
        """Tokens of the prompt, if the client asked for tokens."""
        return {"prompt_token_ids": list(self.prompt_ids)} if self.request.return_token_ids else {}

    @property
    def token_fields(self) -> Body:
        """Sampled tokens and their Versions, if the client asked for tokens."""
        asked = self.request.return_token_ids
        return {"token_ids": list(self.token_ids), "weight_versions": self.spans} if asked else {}

    @property
    def spans(self) -> list[Json]:
        """Spans of sampled tokens by Version; empty while the answer is under way."""
        found, start, generation = list[Json](), 0, self.answering.generation
        versions = generation.completion.versions if generation else ()
        for version, tokens in groupby(versions):
            end = start + len(list(tokens))
            found.append({"version": version, "start": start, "end": end})
            start = end
        return found

    def spelt(self, token: int) -> bytes:
        """Bytes of a token."""
        return self.session.context.renderer.token_bytes(token)


class StreamForm(Protocol):
    """Encodes the answers to one request as a stream."""

    def opening(self) -> Iterator[bytes]:
        """Events before the first text."""

    def news(self, index: int) -> Iterator[bytes]:
        """Events with the new part of an answer, and with its end."""

    def end(self) -> Iterator[bytes]:
        """Events after the end of all answers."""


def _no_stream(replies: Sequence[Reply[R]]) -> StreamForm:
    raise AssertionError("the dialect refuses streams")


def _alone(request: R) -> Sequence[R]:
    return (request,)


@dataclass(frozen=True, slots=True)
class Dialect(Generic[R]):
    """One API: its requests, and the functions to and from the inner form."""

    kind: type[R]
    fields: Rules
    """Rules of all fields."""
    untrained: Rules
    """Rules of trained sessions, in place of those of `fields`."""
    ask: "Callable[[R, TokenTree], AnswerRequest]"
    """Turns a request to the session of a token tree into the inner form. Raises `Refusal`."""
    body: Callable[[Sequence[Reply[R]]], Body]
    stream: Callable[[Sequence[Reply[R]]], StreamForm] = _no_stream
    named: bool = False
    """Whether events carry their type as their name."""
    each: Callable[[R], Sequence[R]] = _alone
    """Splits a request into one per prompt. Raises `Refusal`."""
    tables: Mapping[bool, FieldTable] = field(init=False)
    """Rules without and with training."""

    def __post_init__(self) -> None:
        tables = {False: FieldTable(self.fields), True: FieldTable({**self.fields, **self.untrained})}
        object.__setattr__(self, "tables", tables)

    def request(self, data: bytes, *, is_trained: bool) -> R:
        """Parses a body. Raises `SessionError` or `Refused`, naming the field.

        A trained session refuses fields that would make its logprobs wrong. It ignores unknown fields, because an
        agent's library may send more of them. Other sessions refuse unknown fields, so that typos are noticed.
        """
        return converted(fields_of(data, self.tables[is_trained], strict=not is_trained), self.kind)


def text_of(where: str, content: str | Sequence[TextPart] | None) -> str:
    """Text of the parts, joined. Raises `Refusal` for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None:
            raise Refusal(where, "parts of text", part.type)
    return "".join(part.text or "" for part in content)


def conversation(messages: Iterable[Message], tools: Sequence[object] | None, template: str = "") -> Conversation:
    """Conversation of a request, with the tools as JSON whose fields keep their order. Raises `Refusal`."""
    whole = tuple(messages)
    if len(whole) > MOST_MESSAGES:
        raise Refusal("messages", f"at most {MOST_MESSAGES} entries", len(whole), "leave out older ones")
    if not whole:
        raise Refusal("messages", "at least one", [])
    for i, message in enumerate(whole):
        unicode(f"messages[{i}].content", message.content)
    for i, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(f"tools[{i}]", '{"type": "function", "function": {"name": ...}}', tool)
    return Conversation(whole, json.dumps(tools, ensure_ascii=False) if tools else "", template)


def function_tool(name: str, description: str | None, parameters: dict[str, object] | None) -> dict[str, object]:
    """Tool in the shape that templates read."""
    function = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": function}


def event_bytes(event: Body, *, named: bool = False) -> bytes:
    """Server-sent event with this body; a named one carries its type."""
    data = b"data: " + msgspec.json.encode(event) + b"\n\n"
    return b"event: " + str(event["type"]).encode() + b"\n" + data if named else data


def stops_of(field: str, asked: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop texts of a request. Raises `Refusal`."""
    stops = [asked] if isinstance(asked, str) else asked or []
    if len(stops) > MOST_STOPS:
        raise Refusal(field, f"at most {MOST_STOPS} texts", len(stops), "send the most likely ones")
    return tuple(unicode(field, stop) for stop in stops if stop)


def schema_of(kind: str, schema: object) -> str:
    """JSON Schema of an answer's format as text: any object without one, empty for plain text."""
    if kind == "text":
        return ""
    return json.dumps(schema if kind == "json_schema" and schema is not None else {"type": "object"})


def tool_names(tools: Sequence[object] | None) -> tuple[str, ...]:
    """Names of tools in the shape of `function_tool`."""
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, dict)]
    return tuple(one["name"] for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str))


def wanted_calls(field: str, choice: str, named: str, tools: Sequence[object] | None) -> tuple[str, ...]:
    """Names of the tools, one of which the answer must call; empty where a call is optional. Raises `Refusal`.

    `choice` is OpenAI's `tool_choice`; `named` is the only tool to call.
    """
    names = tool_names(tools)
    if choice not in ("auto", "none", "required"):
        raise Refusal(field, "'auto', 'none', 'required', or a tool by its name", choice)
    if named and named not in names:
        raise Refusal(field, f"one of the tools ({', '.join(names) or 'none given'})", named)
    if choice == "required" and not names:
        raise Refusal(field, "at least one entry in tools", choice, "send tools, or leave it out")
    return (named,) if named else names if choice == "required" else ()


def continued(spoken: Conversation) -> Conversation:
    """Conversation in which the text of a final assistant's message is the beginning of the next answer."""
    *before, last = spoken.messages
    if last.role is Role.ASSISTANT and last.content and not last.tool_calls:
        return replace(spoken, messages=tuple(before), begun=last.content)
    return spoken


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
