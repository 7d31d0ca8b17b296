"""The text of tokens as they come, without decoding all of them again each time."""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"  # what bytes are decoded to that are not a whole character, perhaps not yet
WINDOW_TOKENS = 8


class Tokenizer(Protocol):
    """The part of transformers' tokenizers that is needed here."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...


class Detokenizer:
    """Gives the text of growing tokens piece by piece. The pieces, with `rest` as the last, are the text of them all.

    What is decoded is a window over the last tokens. Invariant: the window begins where the text so far ended with a
    whole character, and its first tokens, whose text was given, have some text. So they decode as they do among all
    tokens, and those after them as well, also where a decoder strips the space that the very first token begins with.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int]) -> None:
        """`tokens` may grow while this is used."""
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._first = 0  # of the window
        self._next_first = 0  # where it will begin when it has grown
        self._given = 0  # characters of the window's text

    def more(self, end: int) -> str:
        """What the tokens before `end` add, but for a character that may lack its last bytes."""
        text = self._decoded(self._first, end)
        piece = self._piece(text.rstrip(REPLACEMENT))
        if end - self._next_first >= WINDOW_TOKENS and not text.endswith(REPLACEMENT):
            after = self._decoded(self._next_first, end)
            if after:
                self._first, self._next_first, self._given = self._next_first, end, len(after)
        return piece

    def rest(self, end: int) -> str:
        """What is left when no token will follow those before `end`."""
        return self._piece(self._decoded(self._first, end))

    def _decoded(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True)

    def _piece(self, text: str) -> str:
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        return piece
