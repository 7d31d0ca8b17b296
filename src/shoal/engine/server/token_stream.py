"""Tokens of an answer under way, handed from the engine's thread to the event loop."""

import asyncio
from collections.abc import Iterable

from shoal.engine.compute.request import Request
from shoal.interfaces import ServedToken, ServedTokens


class TokenStream:
    """The tokens of a request's one completion, some at a time."""

    def __init__(self, request: Request, every: int) -> None:
        """`every` is the least number of tokens at a time until the last; 0 gives them all at once."""
        self.request = request
        self.ended = False
        """Whether `news` has given the last tokens."""
        self._every = every
        self._seen = 0
        self.queue: asyncio.Queue[ServedTokens] = asyncio.Queue()
        """Tokens for the event loop; the last ones have a finish reason."""

    def news(self) -> ServedTokens | None:
        """The tokens since the last call, if they are enough or the last; for the engine's thread, after a step."""
        if self.ended or not self.request.drafts:
            return None
        (draft,), seen = self.request.drafts, self._seen
        self.ended = draft.finish_reason is not None
        if not self.ended and (not self._every or len(draft.sampled) - seen < self._every):
            return None
        rows = zip(draft.sampled[seen:], draft.logprobs[seen:], draft.tops[seen:], strict=True)
        self._seen = len(draft.sampled)
        return ServedTokens(tuple(ServedToken(*row) for row in rows), draft.finish_reason)


def pass_on(news: Iterable[tuple[TokenStream, ServedTokens]]) -> None:
    """Hands each stream its tokens; on the event loop."""
    for stream, tokens in news:
        stream.queue.put_nowait(tokens)
