"""A teacher at a URL: a model behind OpenAI's text completions scores the text of each row, with any tokenizer.

It is asked with `echo` and `logprobs`, as vLLM, SGLang and `shoal serve` answer them. Each sampled token is reinforced
with the teacher's logprob of its span less its own (reverse KL, as with a teacher that the trainer loads).
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import accumulate

import msgspec

from shoal.config.training import TrainConfig
from shoal.errors import ConfigError
from shoal.interfaces import Renderer
from shoal.model.chat_template import ChatRenderer
from shoal.model.spans import bounded, common_spans, token_ends
from shoal.net.chat import REFUSED_FOR_NOW, only_model
from shoal.net.client import Client, Retry, session
from shoal.types import Sample

KEY_VARIABLE = "SHOAL_TEACHER_KEY"
AT_ONCE = 16
"""Rows that the teacher scores at once."""
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
        """Advantage of each token; None for those of which the teacher says nothing."""
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
        spelt, logprobs = list(echo.tokens), [value or 0.0 for value in echo.token_logprobs]
        while spelt and sum(map(len, spelt)) > len(text):  # tokens with which its tokenizer begins every text
            del spelt[0], logprobs[0]
        if "".join(spelt) != text or "" in spelt or len(spelt) != len(logprobs):
            return None
        return list(zip(accumulate(len(one.encode()) for one in spelt), logprobs, strict=True))


@asynccontextmanager
async def text_teacher(train: TrainConfig, renderer: Renderer) -> AsyncIterator[TextTeacher | None]:
    """Teacher at the URL of `train.teacher`, whose key is in the environment; None for another teacher, or none.

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
