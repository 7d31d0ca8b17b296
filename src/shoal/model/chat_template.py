"""Messages to tokens and back, through one chat template."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import jinja2
import tokenizers
from tokenizers.decoders import DecodeStream

from shoal.errors import SessionError
from shoal.model.answer import BODY, CHANNEL, MARKS, THINK, Parted, harmony, in_channels, in_form, parted, written
from shoal.model.token_bytes import TokenBytes
from shoal.model.tool_calls import CallFormat, SampledCall, call_format, split_calls
from shoal.types import Json, Message, Role, ToolCall

# Stand-ins for the messages before a bridge: no template changes them, and no conversation contains them.
ASKED, ANSWERED = "shoal0asked0", "shoal0answered0"
BASES_KEPT = 32
LONG_CHARACTERS = 1 << 14
"""Characters from which a text is tokenised as a batch."""
HEADER_TOKENS = 16
"""Tokens at the end of a prompt that are searched for a mark that opens a thought."""


UNRENDERED = (jinja2.TemplateError, TypeError, ValueError, RecursionError)
"""Errors of a template that refuses messages, or of tools and arguments that are nested too deep for it."""


class _Tokenizer(Protocol):
    """Part of a Hugging Face tokenizer that the renderer uses."""

    eos_token_id: int | None
    chat_template: str | None

    def apply_chat_template(self, conversation: list[dict[str, Json]], **options: Any) -> str: ...
    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """Parsed answer."""

    content: str
    reasoning: str = ""
    calls: tuple[SampledCall, ...] = ()
    ill_formed: bool = False
    """Whether `content` has text that looks like a call but is not well-formed."""


class ChatRenderer:
    """Implements `interfaces.Renderer` for one tokenizer and its template."""

    def __init__(self, tokenizer: _Tokenizer, stop_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        # The tokenizer's own `encode` uses a batch of one, which wakes a thread pool for every text.
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        template = tokenizer.chat_template or ""
        self.has_template = tokenizer.chat_template is not None
        """Whether the model has a chat template; base models lack one."""
        self.in_channels = CHANNEL in template and BODY in template
        """Whether channels part thoughts from answers, as in GPT-OSS; other templates mark thoughts, or have none."""
        self._marks = next((marks for marks in MARKS if marks[1] in template), None)
        self.thought_marks = self._marks or THINK
        """Marks that open and close a thought in an answer's text."""
        self.call_format = call_format(tokenizer.chat_template)
        self.takes_tools = self.call_format is not CallFormat.NONE
        """Whether the template can show tools and the parser can read its model's calls."""
        self.names_calls = "[ARGS]" in template
        """Whether listed calls have the form `name[ARGS]{...}`."""
        self._base = lru_cache(BASES_KEPT)(self._rendered_base)
        self.opens_thought = lru_cache(BASES_KEPT)(self._opening)
        """Whether the header of the assistant's turn opens a thought, under these template arguments."""
        stops = {stop: tokenizer.decode([stop], skip_special_tokens=False) for stop in stop_token_ids}
        self._stops = dict(sorted(stops.items(), key=lambda stop: self._end_at(stop[1])))
        self.stop_token_ids = tuple(self._stops)
        """Tokens that end an assistant's turn; the first one is the template's."""

    def parts_thoughts(self, template: str = "") -> bool:
        """Whether answers under these template arguments may have thoughts apart from them."""
        return self.in_channels or self._marks is not None or self.opens_thought(template)

    def is_special(self, text: str) -> bool:
        """Whether a text is the name of a special token."""
        return self._backend.token_to_id(text) in self.token_bytes.special

    def token_id(self, name: str) -> int:
        """Id of a token by its name."""
        found = self._backend.token_to_id(name)
        assert found is not None, f"no token is called {name}"
        return found

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Function from a token to its bytes."""
        return TokenBytes(self._backend)

    def next_text(self, decoder: DecodeStream, token: int) -> str:
        """Text that a token adds to those that the decoder has seen; empty for the first bytes of a character."""
        return decoder.step(self._backend, token) or ""

    def prompt_ids(self, messages: Sequence[Message], tools: str = "", template: str = "") -> list[int]:
        """Tokens of the conversation up to and including the header of the assistant's turn.

        `tools` is a JSON array, `template` a JSON object of further template arguments; empty strings mean none. A
        tokenizer without a chat template (a base model) gets the contents joined by blank lines. Raises `SessionError`
        for messages that the template refuses.
        """
        if not self.has_template:
            text = "\n\n".join(message.content for message in messages)
            return self._backend.encode(text, add_special_tokens=True).ids
        try:
            return self.token_ids(self._rendered(messages, tools, template))
        except UNRENDERED as error:
            raise SessionError(f"messages: the model's chat template refuses them: {error}") from error

    def bridge_ids(self, tail: Sequence[Message], tools: str = "", template: str = "") -> list[int] | None:
        """Tokens between a sampled answer and the next one, beginning with the token that closes the answer.

        The tail is rendered after a stand-in for the earlier dialogue. None when the bridge cannot be separated from
        the stand-in: the caller then renders the whole conversation, never a guess.
        """
        text = self._bridge(tail, tools, template)
        return None if text is None else self._closed(text)

    def token_ids(self, text: str, *, begins: bool = False) -> list[int]:
        """Tokens of a text by itself; one that `begins` a prompt has the tokens that the tokenizer adds, such as BOS.

        A text that has them already gets no second ones.
        """
        ids = self._encoded(text, False)
        added = self._backend.encode("", add_special_tokens=True).ids if begins else []
        if not added or ids[: len(added)] == added:
            return ids
        return self._encoded(text, True)

    def _encoded(self, text: str, special: bool) -> list[int]:
        """Tokens of a text; only a batch lets other threads run meanwhile, and is worth it for long texts alone."""
        if len(text) < LONG_CHARACTERS:
            return self._backend.encode(text, add_special_tokens=special).ids
        (encoded,) = self._backend.encode_batch([text], add_special_tokens=special)
        return encoded.ids

    @cached_property
    def longest_token(self) -> int:
        """Maximum characters of one token."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def answer(
        self, token_ids: Sequence[int], *, tools: bool, template: str = "", after: Message | None = None
    ) -> Answer:
        """Parses a sampled answer; calls are parsed when the conversation has `tools`.

        `template` holds the template arguments of the conversation, as for `prompt_ids`. `after` is the earlier part of
        a truncated answer that this one continues.
        """
        opened = self.opens_thought(template)
        if after is not None and (after.reasoning or after.content):
            opened = not after.content
        ids = self._without_stop(token_ids)
        if not (tools and self.takes_tools):
            said = self._parted(ids, opened)
            return Answer(said.answer, said.thought)
        # Marks of calls may be special tokens, which plain text lacks.
        raw = self._raw(ids)
        said = harmony(raw, opened=opened) if self.in_channels else Parted("", raw)
        if self._marks is not None:
            said = parted(raw, self._marks, opened=opened)
        split = split_calls(said.answer, self.call_format)
        if split.calls or split.ill_formed:
            return Answer(split.content, said.thought, split.calls, split.ill_formed)
        said = self._parted(ids, opened)
        return Answer(said.answer, said.thought)

    def message(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> Message:
        """Message of a sampled answer to a prompt, with thought and answer apart."""
        ids = self._without_stop(token_ids)
        said = self._parted(ids, self._ends_open(self._raw(list(prompt_ids[-HEADER_TOKENS:]))))
        return Message(Role.ASSISTANT, said.answer, reasoning=said.thought)

    def completion_ids(self, text: str, prompt_ids: Sequence[int]) -> list[int] | None:
        """Tokens of a text in `answer.written`'s form, as this template's model would write it, without the stop token.

        None for a text that does not parse back to itself.
        """
        opened = self._ends_open(self._raw(list(prompt_ids[-HEADER_TOKENS:])))
        said = parted(text) if self.in_channels or self._marks or opened else Parted("", text)
        if any(self._plain(part) != part for part in (said.thought, said.answer)):
            return None
        if self.in_channels:
            native = in_channels(said)
        elif opened or said.thought:
            native = in_form(said, self.thought_marks, opened=opened)
        else:
            native = text
        ids = self.token_ids(native)
        back = self.message(ids, prompt_ids)
        return ids if (back.reasoning, back.content) == (said.thought, said.answer) else None

    def message_ids(
        self, message: Message, before: Sequence[Message], tools: str, prompt_ids: Sequence[int]
    ) -> list[int] | None:
        """Tokens of an assistant's message after a conversation, as this template's model would write it.

        The stop token is left out. None for a message that does not parse back to itself, and for calls that the
        template cannot show.
        """
        if not message.tool_calls:
            return self.completion_ids(written(message), prompt_ids)
        said = [text for one in message.tool_calls for text in (one.name, one.arguments)]
        parts = [message.content, message.reasoning, *said]
        if not self.takes_tools or any(self._plain(part) != part for part in parts):
            return None
        try:
            prompt = self._rendered(before, tools, "")
            whole = self._rendered([*before, message], tools, "", prompt=False)
        except UNRENDERED:
            return None
        closes = [at for stop in self._stops.values() if (at := whole.find(stop, len(prompt))) >= 0]
        if not whole.startswith(prompt) or not closes:
            return None
        ids = self.token_ids(whole[len(prompt) : min(closes)])
        back = self.answer(ids, tools=True)
        same = (back.content.strip(), back.reasoning) == (message.content.strip(), message.reasoning)
        calls = [(one.name, _arguments(one.arguments)) for one in message.tool_calls]
        return ids if same and [(one.name, _arguments(one.arguments)) for one in back.calls] == calls else None

    def _rendered(self, messages: Sequence[Message], tools: str, template: str, *, prompt: bool = True) -> str:
        text = self._tokenizer.apply_chat_template(
            [template_entry(message) for message in messages],
            tools=json.loads(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=prompt,
            **(json.loads(template) if template else {}),
        )
        text.encode()  # half a surrogate pair, which JSON arguments may have, is a ValueError: no tokenizer reads it
        return text

    def _bridge(self, tail: Sequence[Message], tools: str, template: str) -> str | None:
        if not self.has_template:
            return None
        before = (Message(Role.USER, ASKED), _stand_in(tail))
        try:
            base = self._base(before, tools, template)
            full = self._rendered([*before, *tail], tools, template)
        except UNRENDERED:
            return None
        asked_end = full.find(ASKED) + len(ASKED)
        unique = all(text.count(mark) == 1 for text in (base, full) for mark in (ASKED, ANSWERED))
        # A template's text before the answer must not depend on later messages. Its text in the answer's head may (Qwen
        # 3 shows an empty thought in the last answer only), because the sampled tokens replace it.
        if not unique or base[:asked_end] != full[:asked_end]:
            return None
        answered_end = full.find(ANSWERED) + len(ANSWERED)
        closes = [at for stop in self._stops.values() if (at := full.find(stop, answered_end)) >= 0]
        return full[min(closes) :] if closes else None

    def _end_at(self, stop: str) -> float:
        """Place of a stop token in the template's text after an answer that is the last message; infinity for none."""
        if not self.has_template:
            return math.inf
        try:
            shown = self._base((Message(Role.USER, ASKED), Message(Role.ASSISTANT, ANSWERED)), "", "")
        except UNRENDERED:
            return math.inf
        at = shown.find(stop, shown.find(ANSWERED) + len(ANSWERED))
        return math.inf if at < 0 else at

    def _rendered_base(self, before: tuple[Message, ...], tools: str, template: str) -> str:
        """Stand-in dialogue by itself; all tails that a user begins share it."""
        return self._rendered(before, tools, template, prompt=False)

    def _closed(self, text: str) -> list[int]:
        """Tokens of a bridge whose closing token is the stop token.

        Merging the close with later text would give another token, and a sampled close would be written twice.
        """
        stop, mark = max(self._stops.items(), key=lambda pair: len(pair[1]) if text.startswith(pair[1]) else 0)
        return [stop, *self.token_ids(text[len(mark) :])]

    def _opening(self, template: str = "") -> bool:
        """Whether the header of the assistant's turn already opens a thought."""
        return self._ends_open(self._rendered([Message(Role.USER, ASKED)], "", template))

    def _ends_open(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.thought_marks[0])

    def _raw(self, ids: list[int]) -> str:
        """Text of tokens, special tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _parted(self, ids: list[int], opened: bool) -> Parted:
        """Thought and answer of sampled tokens, where the template or the prompt marks thoughts."""
        if self.in_channels:
            return harmony(self._raw(ids), opened=opened)
        if self._marks is None and not opened:
            return Parted("", self.text(ids))
        marks = self.thought_marks
        said, raw = (parted(text, marks, opened=opened) for text in (self.text(ids), self._raw(ids)))
        if raw.thought == said.thought and raw.complete == said.complete:
            return said
        # The marks are special tokens, which plain text lacks.
        return Parted(self._plain(raw.thought), self._plain(raw.answer), raw.complete)

    def _without_stop(self, token_ids: Sequence[int]) -> list[int]:
        return list(token_ids[:-1] if token_ids and token_ids[-1] in self.stop_token_ids else token_ids)

    def _plain(self, text: str) -> str:
        return self.text(self.token_ids(text))


def _stand_in(tail: Sequence[Message]) -> Message:
    """Stand-in answer before the tail; before a tool's result it has a call."""
    if not tail or tail[0].role is not Role.TOOL:
        return Message(Role.ASSISTANT, ANSWERED)
    call = ToolCall(tail[0].tool_call_id, "tool", json.dumps({"argument": ANSWERED}))
    return Message(Role.ASSISTANT, "", (call,))


def template_entry(message: Message) -> dict[str, Json]:
    """Message in the form that templates read."""
    entry: dict[str, Json] = {"role": message.role.value, "content": message.content}
    if message.reasoning:
        entry["reasoning_content"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = [_call_entry(call) for call in message.tool_calls]
    if message.role is Role.TOOL and message.tool_call_id:
        entry["tool_call_id"] = message.tool_call_id
    return entry


def _call_entry(call: ToolCall) -> Json:
    """Call in the form that templates read."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}


def _arguments(text: str) -> Json:
    """Arguments of a call: an object, or text when they are not JSON."""
    try:
        arguments: Json = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return arguments
