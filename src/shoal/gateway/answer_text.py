"""Text of one answer while its tokens come: what may be shown, and where a stop string ends it."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from shoal.model.chat_template import Answer, ChatRenderer

PARSES = 32
"""An answer with thoughts is parsed again when it has grown by this part, so that the work stays linear."""
UNFINISHED = "\ufffd"
"""Decoded place of a character whose bytes have not all come."""


def held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of a text with which one of `marks` may begin.

    >>> held_back("so </thi", ["</think>"]), held_back("so", ["</think>"])
    (5, 0)
    """
    longest = max((len(mark) - 1 for mark in marks), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


class AnswerText:
    """Reader of one answer; `content` and `reasoning` only ever grow, and may be shown at once.

    Stop strings end the content; a thought does not end by them.
    """

    def __init__(
        self, renderer: "ChatRenderer", stops: Sequence[str], *, chat: bool, tools: bool = False, template: str = ""
    ) -> None:
        """`chat` parts thoughts and, with `tools`, calls, whose content then comes with the last tokens."""
        self.content = self.reasoning = ""
        self.stopped = False
        """Whether a stop string ended the answer."""
        self.answer: Answer | None = None
        """The whole answer, once it is parsed after its last token."""
        self._renderer, self._stops = renderer, tuple(stops)
        self._tools, self._template = tools, template
        self.parses = chat and (tools or renderer.parts_thoughts(template))
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._text = ""
        self._ends: list[int] = []  # length of the plain text after each token
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
        """Number of tokens whose text begins before the end of the content."""
        if not self.stopped or not self._ends:
            return len(self._ids)
        return bisect_left(self._ends, len(self.content)) + 1 if self.content else 0

    def _decode(self, token_ids: Sequence[int], last: bool) -> None:
        for token in token_ids:
            self._text += self._renderer.next_text(self._decoder, token)
            self._ends.append(len(self._text))
        if last and (whole := self._renderer.text(self._ids)).startswith(self._text):
            self._text = whole
        self._show(self._text, last)

    def _parse(self, last: bool) -> None:
        if not last and len(self._ids) - self._parsed < max(1, len(self._ids) // PARSES):
            return
        self._parsed = len(self._ids)
        answer = self._renderer.answer(self._ids, tools=self._tools and last, template=self._template)
        self.reasoning = self._grown(self.reasoning, answer.reasoning, last).rstrip()
        if self._tools and not last:
            return
        content = answer.content
        if not content.startswith(self.content):  # a thought closed that had not opened: the stream goes on as text
            content = self._renderer.text(self._ids)
        self._show(content, last)
        if last:
            self.answer = answer

    def _show(self, text: str, last: bool) -> None:
        """Shows a text up to its first stop string, or to where one may begin."""
        longest = max(map(len, self._stops), default=0)
        searched = max(len(self.content) - longest, 0)
        found = [at for stop in self._stops if (at := text.find(stop, searched)) >= 0]
        if found:
            self.content, self.stopped = text[: min(found)], True
        else:
            self.content = self._grown(self.content, text, last)

    def _grown(self, shown: str, text: str, last: bool) -> str:
        if not last:
            marks = (*self._stops, *self._renderer.thought_marks) if self.parses else self._stops
            text = text.rstrip(UNFINISHED)
            text = text[: len(text) - held_back(text, marks)]
        return text if text.startswith(shown) else shown
