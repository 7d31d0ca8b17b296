"""Incremental decoding of one answer: the text that is safe to send, and the end at a stop text or a first call."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from shoal.types import Message

if TYPE_CHECKING:
    from shoal.model.chat_template import Answer, ChatRenderer

PARSES = 32
"""An answer with thoughts is parsed again once it has grown by 1/PARSES, so that the work stays linear."""
UNFINISHED = "\ufffd"
"""Decoded in place of a character whose bytes are incomplete."""


def held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest suffix of a text that is a proper prefix of one of `marks`.

    >>> held_back("so </thi", ["</think>"]), held_back("so", ["</think>"])
    (5, 0)
    """
    longest = max((len(mark) - 1 for mark in marks), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


class AnswerText:
    """Decodes one answer; `content` and `reasoning` only grow, so that they may be sent at once.

    Stop texts are searched in the answer, not in its thought.
    """

    def __init__(
        self,
        renderer: "ChatRenderer",
        stops: Sequence[str],
        *,
        chat: bool,
        tools: bool = False,
        template: str = "",
        one_call: bool = False,
        after: Message | None = None,
    ) -> None:
        """`chat` separates thoughts and, with `tools`, calls; then the content comes with the last tokens.

        With `one_call` the answer ends after its first call. `after` is the earlier part of the answer.
        """
        self.content = self.reasoning = ""
        self.stopped = False
        """Whether a stop text or the first call ended the answer."""
        self.stop = ""
        """The stop text that ended the answer."""
        self.answer: Answer | None = None
        """The whole answer, once it is parsed after its last token."""
        self._renderer, self._stops, self._after = renderer, tuple(stops), after
        self._tools, self._template = tools, template
        self._one_call = one_call and tools
        self.parses = chat and (tools or renderer.parts_thoughts(template))
        self.watches = bool(self._stops or self._one_call)
        """Whether the answer may end before its stop token."""
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._text = ""
        self._parsed = 0

    def add(self, token_ids: Sequence[int], *, last: bool) -> None:
        """Reads the next tokens; `last` says that no more will come."""
        if self.stopped:
            return
        self._ids += token_ids
        if self.parses:
            self._parse(last)
        else:
            self._decode(token_ids, last)

    def kept(self) -> int:
        """Number of tokens of the answer, up to and including the stop text or the first call."""
        return self._first(self._is_over) if self.stopped else len(self._ids)

    def shown(self) -> int:
        """Number of tokens whose text begins before the end of the content."""
        if not self.stopped:
            return len(self._ids)
        return self._first(lambda size: len(self._text_of(size)) >= len(self.content)) if self.content else 0

    @property
    def whole(self) -> "Answer":
        """The complete answer, without its stop text."""
        from shoal.model.chat_template import Answer

        return self.answer or Answer(self.content, self.reasoning)

    def _first(self, holds: Callable[[int], bool]) -> int:
        """Least number of tokens for which a monotone condition holds."""
        return bisect_left(range(len(self._ids)), True, lo=1, key=holds)

    def _is_over(self, size: int) -> bool:
        """Whether the first `size` tokens contain a stop text or a call."""
        text = self._text_of(size)
        return any(stop in text for stop in self._stops) or (self._one_call and bool(self._answer(size, True).calls))

    def _text_of(self, size: int) -> str:
        """Text of the first `size` tokens after the thought, including calls."""
        return self._answer(size, False).content if self.parses else self._renderer.text(self._ids[:size])

    def _answer(self, size: int, tools: bool) -> "Answer":
        ids = self._ids[:size]
        return self._renderer.answer(ids, tools=tools, template=self._template, after=self._after)

    def _decode(self, token_ids: Sequence[int], last: bool) -> None:
        for token in token_ids:
            self._text += self._renderer.next_text(self._decoder, token)
        if last and (whole := self._renderer.text(self._ids)).startswith(self._text):
            self._text = whole
        self._show(self._text, last)

    def _parse(self, last: bool) -> None:
        if not last and len(self._ids) - self._parsed < max(1, len(self._ids) // PARSES):
            return
        self._parsed = len(self._ids)
        if self.watches and self._is_over(len(self._ids)):
            self._end()
            return
        answer = self._answer(len(self._ids), self._tools and last)
        self.reasoning = self._grown(self.reasoning, answer.reasoning, last).rstrip()
        if self._tools and not last:
            return
        content = answer.content
        if not content.startswith(self.content):  # a thought closed without an opening: the stream goes on as text
            content = self._renderer.text(self._ids)
        self._show(content, last)
        if last:
            self.answer = answer

    def _end(self) -> None:
        """Ends the answer at its first stop text or call."""
        self.stopped = True
        answer = self._answer(self.kept(), self._tools)
        content = self._before_stop(answer.content)
        if not content.startswith(self.content):
            content = self.content
        self.reasoning = self._grown(self.reasoning, answer.reasoning, True).rstrip()
        self.content, calls = content, answer.calls[:1] if self._one_call else answer.calls
        self.answer = replace(answer, content=content, calls=calls)

    def _before_stop(self, text: str) -> str:
        """Cuts a text before its first stop text, and records that in `stop`."""
        longest = max(map(len, self._stops), default=0)
        searched = max(len(self.content) - longest, 0)
        found = [(at, stop) for stop in self._stops if (at := text.find(stop, searched)) >= 0]
        at, self.stop = min(found, default=(len(text), ""))
        return text[:at]

    def _show(self, text: str, last: bool) -> None:
        """Shows a text up to its first stop text, or to where one may begin."""
        before = self._before_stop(text)
        self.stopped = bool(self.stop)
        self.content = before if self.stopped else self._grown(self.content, text, last)

    def _grown(self, shown: str, text: str, last: bool) -> str:
        if not last:
            marks = (*self._stops, *self._renderer.thought_marks) if self.parses else self._stops
            text = text.rstrip(UNFINISHED)
            text = text[: len(text) - held_back(text, marks)]
        return text if text.startswith(shown) else shown
