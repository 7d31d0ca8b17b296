"""What a client asked for, and the completions being drawn for it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.engine.sampling import Uniforms
from shoal.engine.scheduler import SequenceState
from shoal.types import Completion, FinishReason, Sampling


@dataclass(slots=True, eq=False)
class Draft(SequenceState):
    """A completion being drawn."""

    prompt_ids: Sequence[int] = ()
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=1))
    index: int = 0
    """Which of its request's completions this is."""
    max_drawn: int = 1
    stop_ids: frozenset[int] = frozenset()
    uniforms: Uniforms | None = None
    """Numbers that decide the tokens; None draws from the engine's own stream."""
    targets: Sequence[int] = ()
    """The tokens after positions 0, 1, ... that are to be scored."""
    scores: list[float] = field(default_factory=list)
    """Logprobs of the targets at temperature 1."""
    log_kept: list[float] = field(default_factory=list)
    """Of each drawn token the log of the mass that truncation kept; empty when nothing is truncated."""
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, end): that version drew the tokens before `end` that no earlier span holds."""
    kv_versions: list[tuple[int, int | None]] = field(default_factory=list)
    """(start, version): the tokens from `start` on were drawn on KV of which the oldest is of that version; None: on KV
    of the version that drew them."""
    finish_reason: FinishReason | None = None

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the distribution."""
        sampling = self.sampling
        return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)

    def token_at(self, position: int) -> int:
        """A known token."""
        if position < self.prompt_len:
            return self.prompt_ids[position]
        return self.drawn[position - self.prompt_len]

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens `start : end`."""
        split = self.prompt_len
        return [*self.prompt_ids[start:end], *self.drawn[max(start - split, 0) : max(end - split, 0)]]

    def close_span(self, version: int) -> None:
        """Says that `version` drew every token since the last span."""
        if len(self.drawn) > (self.spans[-1][1] if self.spans else 0):
            self.spans.append((version, len(self.drawn)))

    def keep_kv(self, version: int) -> None:
        """Says that newer weights come, and that the KV stays which `version` or an older one computed."""
        if self.kv_len and not self.stale:
            self.kv_versions.append((len(self.drawn), version))

    def forget(self) -> None:
        """Drops the KV: all known tokens are to be prefilled again."""
        if self.stale:
            self.kv_versions.append((len(self.drawn), None))
        SequenceState.forget(self)  # a slotted dataclass is another class than the one that `super()` knows

    def kv_version(self, index: int) -> int | None:
        """The version of the oldest KV that a drawn token saw; None when it is the one that drew it."""
        return next((version for start, version in reversed(self.kv_versions) if start <= index), None)

    def completion(self) -> Completion:
        """What was drawn, once finished."""
        assert self.finish_reason is not None
        versions: list[int] = []
        for version, end in self.spans:
            versions += [version] * (end - len(versions))
        return Completion(tuple(self.drawn), tuple(self.logprobs), tuple(versions), self.finish_reason)


@dataclass(slots=True, eq=False)
class Request:
    """`n` completions of one prompt. `name` is the client's; it need not be unique."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    n: int = 1
    priority: int = 0
    name: str = ""
    score_ids: Sequence[int] = ()
    """Tokens that are scored and nothing else; the prompt is all of them but the last."""
    drafts: list[Draft] = field(default_factory=list)

    @property
    def scores_only(self) -> bool:
        """Whether nothing is drawn."""
        return bool(self.score_ids)

    @property
    def targets(self) -> Sequence[int]:
        """The tokens to be scored, which follow the prompt's first, second, ... position."""
        return self.score_ids[1:]

    def begun(self, request_id: int, max_model_len: int) -> list[Draft]:
        """Its completions, from now on in `drafts`, each with room for what fits beside the prompt."""
        sampling, targets = self.sampling, self.targets
        most = 0 if self.scores_only else min(sampling.max_tokens, max_model_len - len(self.prompt_ids))
        prompt_key = array("q", self.prompt_ids).tobytes()  # whose hash is computed once
        stop_ids = frozenset(sampling.stop_token_ids)
        self.drafts += [
            Draft(
                request_id=request_id,
                prompt_len=len(self.prompt_ids),
                priority=self.priority,
                prompt_key=prompt_key,
                whole=index == 0 and bool(targets),
                targets=targets if index == 0 else (),
                prompt_ids=self.prompt_ids,
                sampling=sampling,
                index=index,
                max_drawn=most,
                stop_ids=stop_ids,
                uniforms=None if sampling.seed is None else Uniforms(sampling.seed, index),
            )
            for index in range(self.n)
        ]
        return self.drafts

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(draft.finish_reason is not None for draft in self.drafts)


def scoring(token_ids: Sequence[int]) -> Request:
    """The request for the logprobs of at least two tokens, but for the first."""
    assert len(token_ids) > 1
    return Request(token_ids[:-1], Sampling(max_tokens=1), score_ids=token_ids)
