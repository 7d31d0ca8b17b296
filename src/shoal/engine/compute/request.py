"""A request, and the completions being sampled for it."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from shoal.engine.compute.adapters import NamedAdapter
from shoal.engine.compute.logit_rules import RuledLogits, Top
from shoal.engine.compute.scheduler import SequenceState
from shoal.errors import RequestRefused
from shoal.model import UNKNOWN
from shoal.types import FinishReason, Sampling

UNIFORM_BLOCK = 64
NOT_FINITE = "model: expected weights whose logits are finite numbers; train them with a lower learning rate"
Others: TypeAlias = int | Sequence[Sequence[int]]
"""Tokens to score in place of each target: so many of the most likely, or the listed ones."""


class Uniforms:
    """Uniform numbers of one completion: number i decides token i. Equal (seed, index) give equal numbers.

    The Philox key is (seed, index of the completion in its request), so no two completions share a stream.
    """

    def __init__(self, seed: int, index: int) -> None:
        key = np.array([seed % 2**64, index], dtype=np.uint64)
        self._generator = np.random.Generator(np.random.Philox(key=key))
        self._known: list[float] = []

    def __getitem__(self, i: int) -> float:
        while i >= len(self._known):
            self._known += self._generator.random(UNIFORM_BLOCK, dtype=np.float32).tolist()
        return self._known[i]


@dataclass(slots=True, eq=False)
class Draft(SequenceState):
    """Completion being sampled."""

    prompt_ids: Sequence[int] = ()
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=1))
    index: int = 0
    """Index of the completion in its request."""
    max_sampled: int = 1
    stop_ids: frozenset[int] = frozenset()
    uniforms: Uniforms | None = None
    """Random numbers that decide the tokens; None uses the engine's own stream."""
    targets: Sequence[int] = ()
    """Tokens to score, which follow positions 0, 1, ...."""
    scores: list[float] = field(default_factory=list)
    """Nats: logprobs of the targets at temperature 1."""
    others: Others = 0
    ranked: list[list[tuple[int, float]]] = field(default_factory=list)
    """Tokens other than the target with their logprobs, for each target."""
    logprobs: list[float] = field(default_factory=list)
    rules: RuledLogits | None = None
    """Rules of the answer; logprobs of an untrained answer are the model's own."""
    forced: list[int] = field(default_factory=list)
    """Indices of sampled tokens; see `Completion.forced`."""
    kept: list[bytes] = field(default_factory=list)
    """Tokens that could be sampled at each place; see `Completion.kept`."""
    tops: list[Top] = field(default_factory=list)
    """Most likely tokens for each sampled or scored token, where the rules ask for them."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token."""
    finish_reason: FinishReason | None = None
    failed: str = ""
    """Reason why the request is refused although it was computed."""
    adapter: NamedAdapter | None = None
    routing: list[bytes] = field(default_factory=list)
    """Experts of each token whose KV was computed here, from its first computation."""

    @property
    def marked(self) -> tuple[int, ...]:
        """Numbers before the tokens in the key of their KV, which is another under each adapter."""
        return () if self.adapter is None else (-self.adapter.serial,)

    def reason_after(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Adds a sampled token, if its logprob is a number; returns the reason to end with it, if there is one."""
        if not math.isfinite(logprob):
            del self.tops[len(self.sampled) :]
            self.failed = NOT_FINITE
            return FinishReason.ABORT
        self.sampled.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.rules is not None and self.rules.failed:
            self.failed = self.rules.failed
            return FinishReason.ABORT
        if token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.sampled) >= self.max_sampled else None

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens `start : end`."""
        split = self.prompt_len
        return [*self.prompt_ids[start:end], *self.sampled[max(start - split, 0) : max(end - split, 0)]]

    def route(self, position: int, experts: bytes) -> None:
        """Records the experts of a token, unless they are known: it may be computed again under newer weights."""
        unknown = bytes([UNKNOWN]) * len(experts)
        self.routing += [unknown] * (position - len(self.routing))
        if len(self.routing) == position:
            self.routing.append(experts)

    def recorded_routing(self) -> bytes:
        """Experts of all tokens but the last; nothing where the engine records none."""
        return b"".join(self.routing[: self.total - 1])


@dataclass(slots=True, eq=False)
class Request:
    """`n` completions of one prompt. `name` is the client's and need not be unique."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    n: int = 1
    priority: int = 0
    name: str = ""
    score_ids: Sequence[int] = ()
    """Tokens to score without sampling; the prompt is all of them but the last."""
    others: Others = 0
    rules: RuledLogits | None = None
    adapter: str = ""
    """Name of the adapter that answers; empty for the weights alone."""
    drafts: list[Draft] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(draft.finish_reason is not None for draft in self.drafts)


def drafts_of(
    request: Request, request_id: int, max_model_len: int, adapters: Mapping[str, NamedAdapter]
) -> list[Draft]:
    """Drafts of a request, each with the room that the prompt leaves. Raises `RequestRefused` without its adapter."""
    if request.adapter and request.adapter not in adapters:
        known = ", ".join(adapters) or "none"
        raise RequestRefused(f"model: expected the name of a loaded adapter ({known}), got {request.adapter!r}")
    sampling, prompt_len = request.sampling, len(request.prompt_ids)
    room = 0 if request.score_ids else min(sampling.max_tokens, max_model_len - prompt_len)
    # Bytes, because their hash is computed once.
    prompt_key = request.adapter.encode() + b"\0" + array("q", request.prompt_ids).tobytes()
    stop_ids = frozenset(sampling.stop_token_ids)
    return [
        Draft(
            request_id=request_id,
            prompt_len=prompt_len,
            priority=request.priority,
            prompt_key=prompt_key,
            whole=index == 0 and bool(request.score_ids),
            targets=request.score_ids[1:] if index == 0 else (),
            others=request.others,
            prompt_ids=request.prompt_ids,
            sampling=sampling,
            index=index,
            max_sampled=room,
            stop_ids=stop_ids,
            rules=None if request.rules is None else request.rules.copy(),
            uniforms=None if sampling.seed is None else Uniforms(sampling.seed, index),
            adapter=adapters.get(request.adapter),
        )
        for index in range(request.n)
    ]


def scoring(token_ids: Sequence[int], others: Others = 0, adapter: str = "") -> Request:
    """Request for the logprobs of tokens 1..L-1 of at least two tokens, and of `others` in their places."""
    assert len(token_ids) > 1
    return Request(token_ids[:-1], Sampling(max_tokens=1), score_ids=token_ids, others=others, adapter=adapter)
