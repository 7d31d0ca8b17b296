"""Dialects: each API of the gateway turns its requests into one inner form, and a generation into its answer."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import groupby
from typing import Generic, TypeAlias, TypeVar

import msgspec

from shoal.errors import SessionError
from shoal.gateway.sessions import AnswerRequest, SamplingRequest
from shoal.gateway.token_tree import Conversation, Generation, TokenTree
from shoal.net.server import decoded
from shoal.types import FinishReason, Json, Message

Body: TypeAlias = dict[str, Json]


class Refusal(SessionError):
    """Refusal of a field's value that cannot be served (HTTP 400); `field` names the field."""

    def __init__(self, field: str, expected: str, came: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {came!r}")
        self.field = field


class StreamOptions(msgspec.Struct):
    """Stream options; see OpenAI's reference."""

    include_usage: bool | None = False


class ModelRequest(SamplingRequest, kw_only=True):
    """Fields that the requests of all APIs share; unserved values are refused."""

    model: str | None = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False


class TextPart(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


R = TypeVar("R", bound=ModelRequest)
K = TypeVar("K", bound=msgspec.Struct)
SAMPLING: Mapping[str, Sequence[object]] = {
    **dict.fromkeys(("top_k", "typical_p", "top_a"), (0, -1)),
    **dict.fromkeys(("min_p", "min_tokens", "no_repeat_ngram_size"), (0,)),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    **dict.fromkeys(("stop_token_ids", "bad_words", "allowed_token_ids", "logits_processors"), ([],)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), ()),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "include_stop_str_in_output"), (False,)),
}
"""Sampling parameters of vLLM and its like that a session does not know: the values that change nothing."""
WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "verbosity"}
    | {"priority", "cache_salt", "store", "include", "betas", "reasoning", "thinking", "cache_control"}
)
"""Fields of OpenAI's, Anthropic's and vLLM's clients that change no answer here."""


@dataclass(frozen=True, slots=True)
class Reply(Generic[R]):
    """Generation that answers a request."""

    request: R
    generation: Generation
    prompt_ids: tuple[int, ...]
    created: int
    """Time of the request in seconds since 1970."""
    session: str = ""
    """Name of the session's token tree."""

    @property
    def id(self) -> str:
        """Id of the answer, unique among all sessions."""
        return f"{self.session}-{self.generation.id}"

    @property
    def message(self) -> Message:
        """Answer as the client receives it."""
        return self.generation.message

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Sampled tokens."""
        return self.generation.completion.token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Reason why the engine stopped: `stop` or `length`, since an aborted answer is an error."""
        return self.generation.completion.finish_reason

    @property
    def stopped(self) -> bool:
        """Whether the model ended the answer itself."""
        return self.finish_reason is FinishReason.STOP

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
        """Spans of sampled tokens by Version."""
        found, start = list[Json](), 0
        for version, tokens in groupby(self.generation.completion.versions):
            end = start + len(list(tokens))
            found.append({"version": version, "start": start, "end": end})
            start = end
        return found


@dataclass(frozen=True, slots=True)
class Dialect(Generic[R]):
    """One API: its requests, and the functions from and to the inner form."""

    kind: type[R]
    ask: Callable[[R, TokenTree], AnswerRequest]
    """Turns a request, in a session with this token tree, into the inner form. Raises `Refusal`."""
    body: Callable[[Reply[R]], Body]
    events: Callable[[Reply[R]], Iterable[Body]]
    """Events that stream a whole answer."""
    served: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """Values of fields that would change sampling or need an absent service: those that change nothing."""
    named: bool = False
    """Whether events carry their type as name, and no mark ends the stream."""

    def request(self, data: bytes, *, strict: bool = False) -> R:
        """Request of a body. Raises `SessionError` or `Refused`, naming the field.

        Fields that would change the sampling are refused, and so are unknown ones when `strict`: an agent may send
        whatever its library adds, but a typing error of a person must not go unseen.
        """
        return converted(fields_of(data, (self.kind,), {**SAMPLING, **self.served}, strict=strict), self.kind)


def fields_of(
    data: bytes, kinds: Sequence[type[msgspec.Struct]], served: Mapping[str, Sequence[object]], *, strict: bool
) -> dict[str, object]:
    """Fields of a body for `kinds`; the `served` ones have one of their values. Raises as `Dialect.request` does."""
    fields = decoded(data, dict[str, object])
    known = [one.encode_name for kind in kinds for one in msgspec.structs.fields(kind)]
    for name, value in fields.items():
        if name in served and value is not None and value not in (allowed := served[name]):
            raise Refusal(name, f"none or {allowed[-1]!r}" if allowed else "none", value)
        if strict and name not in known and name not in served and name not in WITHOUT_EFFECT:
            near = get_close_matches(name, [*known, *served], 1)
            raise Refusal(name, f"a known field{f', such as {near[0]!r}' if near else ''}", "an unknown one")
    return fields


def converted(fields: dict[str, object], kind: type[K]) -> K:
    """Request of these fields. Raises `SessionError`, naming the field."""
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise SessionError(f"body: {error}") from error


def unicode(where: str, text: str) -> str:
    """Text, if it can be encoded. Raises `Refusal`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refusal(where, "Unicode text", "lone surrogates") from None
    return text


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
