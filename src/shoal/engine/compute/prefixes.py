"""KV of ended sequences, reused by sequences with the same beginning, such as the next turn of a conversation.

Pure: the stored values are opaque here. The size is bounded; the least recently used value goes first.
"""

from bisect import bisect_left
from collections import OrderedDict
from typing import Generic, TypeVar

from shoal.model.prefix_tree import shared_length

V = TypeVar("V")
Tokens = tuple[int, ...]


class PrefixCache(Generic[V]):
    """Values by token row, found by the longest common beginning.

    The rows are kept sorted, so the row that shares most with another is next to its place in the order.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._rows: list[Tokens] = []
        self._values: OrderedDict[Tokens, tuple[V, int]] = OrderedDict()  # with sizes; last used last
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def keep(self, tokens: Tokens, value: V, size_bytes: int) -> None:
        """Stores a value, and drops the values of rows that are its beginnings."""
        at = bisect_left(self._rows, tokens)
        if at < len(self._rows) and self._rows[at][: len(tokens)] == tokens:
            return
        while at > 0 and tokens[: len(self._rows[at - 1])] == self._rows[at - 1]:
            at -= 1
            self._drop(self._rows[at])
        if size_bytes > self._most_bytes:
            return
        self._rows.insert(at, tokens)
        self._values[tokens] = value, size_bytes
        self.size_bytes += size_bytes
        while self.size_bytes > self._most_bytes:
            self._drop(next(iter(self._values)))

    def longest(self, tokens: Tokens) -> tuple[int, V] | None:
        """Length of the longest stored beginning of a row, and its value; None when no token matches."""
        at = bisect_left(self._rows, tokens)
        near = [(shared_length(row, tokens), row) for row in self._rows[max(at - 1, 0) : at + 1]]
        length, row = max(near, default=(0, ()))
        if length == 0:
            return None
        self._values.move_to_end(row)
        return length, self._values[row][0]

    def clear(self) -> None:
        """Forgets everything."""
        self._rows.clear()
        self._values.clear()
        self.size_bytes = 0

    def _drop(self, tokens: Tokens) -> None:
        del self._rows[bisect_left(self._rows, tokens)]
        self.size_bytes -= self._values.pop(tokens)[1]
