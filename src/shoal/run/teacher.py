"""A teacher at a URL: a model behind OpenAI's text completions scores the text of each row, with any tokenizer.

A span of text is the least that both models can be asked about: log p(span) is the sum over its tokens.

The teacher is asked with `echo` and `logprobs`, as vLLM, SGLang and `shoal serve` answer them. Each sampled token is
reinforced with the teacher's logprob of its span less its own (reverse KL, as with a teacher that the trainer loads).
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import accumulate, pairwise

import msgspec

from shoal.config.training import TrainConfig
from shoal.errors import ConfigError
from shoal.interfaces import Renderer
from shoal.model.chat_template import ChatRenderer
from shoal.net.chat import REFUSED_FOR_NOW, only_model
from shoal.net.client import Client, Retry, session
from shoal.types import Sample

MOST_NATS = 5.0
"""Bound on a token's advantage, in nats either way, also for spans that a teacher forbids."""

TokenBytes = Callable[[int], bytes]


def token_ends(token_ids: Sequence[int], token_bytes: TokenBytes, text: str) -> tuple[int, ...] | None:
    """Bytes of the text at which its tokens end; None for tokens that do not spell it, each with at least a byte.

    >>> token_ends([0, 1], [b"ab", b"c"].__getitem__, "abc")
    (2, 3)
    """
    ends, spelt = [0], b"".join(map(token_bytes, token_ids))
    for token in token_ids:
        ends.append(ends[-1] + len(token_bytes(token)))
    rises = all(before < after for before, after in pairwise(ends))
    return tuple(ends[1:]) if rises and spelt == text.encode(errors="surrogatepass") else None


def common_spans(own_ends: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Own tokens and the other's of each span, in order.

    >>> list(common_spans((1, 2, 3), (2, 3)))
    [(slice(0, 2, None), slice(0, 1, None)), (slice(2, 3, None), slice(1, 2, None))]
    """
    i = j = 0
    for end in sorted(set(own_ends) & set(ends)):
        own_to, to = own_ends.index(end, i) + 1, ends.index(end, j) + 1
        yield slice(i, own_to), slice(j, to)
        i, j = own_to, to


def bounded(nats: float) -> float:
    """Advantage within `MOST_NATS`."""
    return min(max(nats, -MOST_NATS), MOST_NATS)


KEY_VARIABLE = "SHOAL_TEACHER_KEY"
AT_ONCE = 16
"""Rows that the teacher scores at once."""
MOST_BEGINNINGS = 2
"""Tokens with which a teacher's tokenizer may begin every text."""
MOST_PARTS = 4
"""Bytes of a character in UTF-8, each of which may be a token."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
PATIENCE = Retry(tries=10, pause_s=0.5, timeouts=True, statuses=lambda code: code >= 500 or code in REFUSED_FOR_NOW)


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs


class _Echo(msgspec.Struct):
    choices: list[_Choice]


class TextTeacher:
    """Teacher of a run."""

    def __init__(self, client: Client, model: str, renderer: ChatRenderer) -> None:
        self._client, self._model, self._token_bytes = client, model, renderer.token_bytes
        self._turns = asyncio.Semaphore(AT_ONCE)
        self.values: dict[str, float] = {}
        """Metrics of the latest step."""

    async def taught(self, groups: Sequence[tuple[Sample, ...]]) -> list[tuple[Sample, ...]]:
        """Rows with the teacher's advantages. Raises `EngineUnavailable` and `RequestRefused`."""
        began_s = time.monotonic()
        rows = {id(row): row for group in groups for row in group}  # repeated where a group is short
        found = dict(zip(rows, await asyncio.gather(*map(self._advantages, rows.values())), strict=True))
        sampled = [
            advantage for key, row in rows.items() for advantage, m in zip(found[key], row.mask, strict=True) if m
        ]
        known = [advantage for advantage in sampled if advantage is not None]
        self.values = {
            "taught_share": len(known) / max(len(sampled), 1),
            "teacher_kl": -sum(known) / max(len(known), 1),
            "teacher_s": time.monotonic() - began_s,
        }
        return [
            tuple(replace(row, advantages=tuple(a or 0.0 for a in found[id(row)])) for row in group) for group in groups
        ]

    async def _advantages(self, row: Sample) -> list[float | None]:
        """Advantage of each token; None for tokens without a teacher's logprob."""
        nothing: list[float | None] = [None] * len(row.tokens)
        text = b"".join(map(self._token_bytes, row.tokens)).decode(errors="ignore")
        own_ends = token_ends(row.tokens, self._token_bytes, text)
        if own_ends is None:  # an answer that ran out of room amid a character
            return nothing
        scored = await self._scored(text)
        if scored is None:
            return nothing
        special = self._token_bytes.special
        for own, other in common_spans(own_ends, [end for end, _ in scored]):
            length, width = own.stop - own.start, other.stop - other.start
            foreign = width > 1 and not special.isdisjoint(row.tokens[own])
            if all(row.mask[own]) and not foreign:
                theirs = sum(logprob for _, logprob in scored[other])
                nothing[own] = [bounded(theirs - sum(row.logprobs[own]))] * length
        return nothing

    async def _scored(self, text: str) -> list[tuple[int, float]] | None:
        """Byte at which each of the teacher's tokens ends, and its logprob; None where they do not spell the text."""
        wanted = {"model": self._model, "prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0}
        async with self._turns:
            echo = (await self._client.ask("POST", "/completions", _Echo, wanted)).choices[0].logprobs
        logprobs = [value or 0.0 for value in echo.token_logprobs]
        skips = range(1 + MOST_BEGINNINGS)
        return next(filter(None, (ends_in(text, echo.tokens[k:], logprobs[k:]) for k in skips)), None)


def ends_in(text: str, pieces: Sequence[str], logprobs: Sequence[float]) -> list[tuple[int, float]] | None:
    """Ends of a text's tokens in UTF-8 bytes, with their logprobs; None if the pieces do not spell the text.

    Servers show a part of a character as U+FFFD or as nothing. A run of such tokens counts as one token, which ends
    where the next piece begins. Returns None if there are several such places.

    >>> ends_in("a\u00e9b", ["a", "\ufffd", "\ufffd", "b"], [-1.0, -2.0, -3.0, -4.0])
    [(1, -1.0), (3, -5.0), (4, -4.0)]
    """
    if len(pieces) != len(logprobs):
        return None
    tokens: list[tuple[str, float]] = []  # text and logprob
    at, hidden, known, run_logprob = 0, 0, 0, 0.0  # of a run: characters at most hidden, characters shown
    for piece, logprob in [*zip(pieces, logprobs, strict=True), (None, 0.0)]:
        is_whole = not hidden and bool(piece) and text.startswith(piece or "", at)
        if piece is not None and not is_whole and (not piece or REPLACEMENT in piece):
            parts = piece.count(REPLACEMENT)
            hidden, known, run_logprob = hidden + max(parts, 1), known + len(piece) - parts, run_logprob + logprob
            continue
        if hidden:
            least = at + known + -(-hidden // MOST_PARTS)
            ends = range(least, min(at + known + hidden, len(text)) + 1)
            fits = [end for end in ends if (text.startswith(piece, end) if piece is not None else end == len(text))]
            if len(fits) != 1:
                return None
            tokens.append((text[at : fits[0]], run_logprob))
            at, hidden, known, run_logprob = fits[0], 0, 0, 0.0
        if piece is not None:
            if not text.startswith(piece, at):
                return None
            tokens.append((piece, logprob))
            at += len(piece)
    if at != len(text):
        return None
    places = accumulate(len(shown.encode()) for shown, _ in tokens)
    return [(place, logprob) for place, (_, logprob) in zip(places, tokens, strict=True)]


@asynccontextmanager
async def text_teacher(train: TrainConfig, renderer: Renderer) -> AsyncIterator[TextTeacher | None]:
    """Teacher at the URL of `train.teacher`, with its key from the environment; None without a URL.

    Raises `ConfigError` and `EngineUnavailable`.
    """
    url = train.teacher_url
    if url is None:
        yield None
        return
    if not isinstance(renderer, ChatRenderer):
        raise ConfigError(f"train.teacher: expected a model with a tokenizer of text for a teacher at {url}")
    key = os.environ.get(KEY_VARIABLE, "")
    async with session() as http:
        model = await only_model(http, url, key)
    async with aclosing(Client(url, token=key, retry=PATIENCE)) as client:
        yield TextTeacher(client, model, renderer)
