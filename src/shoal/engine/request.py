"""What a client asked for, and the completions being drawn for it."""

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
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, end): that version drew the tokens before `end` that no earlier span holds."""
    finish_reason: FinishReason | None = None

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
    drafts: list[Draft] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(draft.finish_reason is not None for draft in self.drafts)
