"""Which sequences run, and what each computes in the next step. Pure: no torch, no clock, no I/O.

A sequence is one completion being drawn. It waits, runs (holds KV), and leaves. While it runs it either *prefills*,
that is, computes the KV of tokens that are already known, a chunk at a time, or *decodes* one token per step. Dropping
its KV (interruption, pre-emption) only sends it back to prefilling prompt + drawn tokens, never loses a token.

Nothing starves: every `fair_every`-th admission takes the sequence that has waited longest whatever its priority, what
does not fit stops the queue instead of being overtaken, and memory is taken from the latest arrival only, so that the
oldest running sequence always finishes.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar


@dataclass(slots=True, eq=False)
class SequenceState:
    """What the scheduler knows of one sequence. Siblings are sequences with the same prompt; its KV is computed once.

    Invariant: while `decoding`, KV is stored for all tokens but the last.
    """

    request_id: int
    prompt_len: int
    priority: int = 0
    arrival: int = -1
    drawn: list[int] = field(default_factory=list)
    cached: int = 0
    """Tokens whose KV is stored, while prefilling."""
    decoding: bool = False
    stale: bool = False
    """Whether some of the KV was computed under older weights."""
    prompt_key: Hashable = None
    """Equal for equal prompts; None has only those of the same request be siblings."""
    whole: bool = False
    """Whether it computes its tokens itself instead of taking a copy of their KV."""

    @property
    def family(self) -> Hashable:
        """What siblings have in common."""
        return self.request_id if self.prompt_key is None else self.prompt_key

    @property
    def total(self) -> int:
        """Tokens known: prompt and drawn."""
        return self.prompt_len + len(self.drawn)

    @property
    def kv_len(self) -> int:
        """Tokens whose KV is stored."""
        return self.total - 1 if self.decoding else self.cached

    def forget(self) -> None:
        """Drops the KV: all known tokens are to be prefilled again."""
        self.cached, self.decoding, self.stale = 0, False, False


S = TypeVar("S", bound=SequenceState)

SPARED = 8
"""Admission leaves one in so many tokens of scarce memory for what runs to grow into. Without, there are four to seven
times as many pre-emptions, and storage is laid out anew two to four times as often."""


@dataclass(frozen=True, slots=True)
class Copy(Generic[S]):
    """KV of the first `length` tokens, copied before the step from a sibling."""

    source: S
    target: S
    length: int


@dataclass(frozen=True, slots=True)
class Chunk(Generic[S]):
    """Known tokens `start : start + length` of a sequence, prefilled in this step.

    When `completes`, the next token is drawn from the last position; `followers` are fresh siblings that take a copy of
    the prompt's KV after the step and draw their first token from the same logits.
    """

    sequence: S
    start: int
    length: int
    completes: bool
    followers: tuple[S, ...]


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[S]):
    """One step. The same object is returned again for as long as only decoding goes on."""

    preempted: tuple[S, ...]
    copies: tuple[Copy[S], ...]
    chunks: tuple[Chunk[S], ...]
    decode: tuple[S, ...]

    @property
    def sequences(self) -> list[S]:
        """All whose KV is written."""
        chunked = (s for chunk in self.chunks for s in (chunk.sequence, *chunk.followers))
        return [*self.decode, *chunked, *(copy.target for copy in self.copies)]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.chunks or self.decode)


class Scheduler(Generic[S]):
    """Admission, chunked prefill, pre-emption.

    `capacity(tokens)` is what storing that many tokens occupies. `reuse(sequence)` says of how many of its first tokens
    KV is at hand and will be in place when the plan is computed; never of all.
    """

    def __init__(
        self,
        *,
        max_running: int,
        kv_budget_tokens: int,
        chunk_tokens: int,
        max_model_len: int,
        capacity: Callable[[int], int] = lambda tokens: tokens,
        reuse: Callable[[S], int] = lambda _: 0,
        fair_every: int = 8,
    ) -> None:
        assert kv_budget_tokens >= capacity(max_model_len), "one sequence of full length must fit"
        self.running: list[S] = []
        self.admitting = True
        self._max_running = max_running
        self._budget = kv_budget_tokens
        self._chunk_tokens = chunk_tokens
        self._capacity = capacity
        self._reuse = reuse
        self._fair_every = fair_every
        self._scarce = max_running * capacity(max_model_len) > kv_budget_tokens
        self._spared = kv_budget_tokens // SPARED
        self._waiting: dict[int, S] = {}  # by arrival
        self._by_priority: list[tuple[int, int]] = []  # heaps with entries of gone sequences left in
        self._by_arrival: list[int] = []
        self._arrivals = 0
        self._admissions = 0
        self._siblings: dict[Hashable, list[S]] = {}  # running ones, by family
        self._plan: StepPlan[S] | None = None

    @property
    def waiting(self) -> int:
        """Sequences queued."""
        return len(self._waiting)

    def add(self, sequence: S) -> None:
        """Queues a new sequence."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._queue(sequence)

    def remove(self, sequence: S) -> None:
        """Takes a sequence out, finished or not, running or not."""
        if self._waiting.pop(sequence.arrival, None) is None:
            self._leave(sequence)

    def forget(self) -> None:
        """Drops the KV of every running sequence."""
        for sequence in self.running:
            sequence.forget()
        self._plan = None

    def mark_stale(self) -> None:
        """Notes that the KV stored now belongs to older weights, so that no sibling copies it."""
        for sequence in self.running:
            sequence.stale = sequence.kv_len > 0
        self._plan = None

    def plan(self) -> StepPlan[S]:
        """The next step. The caller then draws a token for each sequence in `decode` and each completing chunk."""
        preempted = self._preempt() if self._scarce else ()
        admitted = self._admit()
        if self._plan is None or preempted or admitted:
            copies, chunks = self._prefill()
            just_completed = {id(s) for chunk in chunks if chunk.completes for s in (chunk.sequence, *chunk.followers)}
            decode = tuple(s for s in self.running if s.decoding and id(s) not in just_completed)
            plan = StepPlan(tuple(preempted), tuple(copies), tuple(chunks), decode)
            steady = not (preempted or copies or chunks) and len(decode) == len(self.running)
            self._plan = plan if steady else None
            return plan
        return self._plan

    def _queue(self, sequence: S) -> None:
        self._waiting[sequence.arrival] = sequence
        heapq.heappush(self._by_priority, (-sequence.priority, sequence.arrival))
        heapq.heappush(self._by_arrival, sequence.arrival)

    def _leave(self, sequence: S) -> None:
        self.running.remove(sequence)
        siblings = self._siblings[sequence.family]
        siblings.remove(sequence)
        if not siblings:
            del self._siblings[sequence.family]
        self._plan = None

    def _held(self, sequences: Iterable[S]) -> int:
        return sum(self._capacity(sequence.total + 1) for sequence in sequences)

    def _preempt(self) -> list[S]:
        """Sends the latest arrivals back to the queue until what runs has room for one more token each."""
        victims: list[S] = []
        while self._held(self.running) > self._budget and len(self.running) > 1:
            victim = max(self.running, key=lambda sequence: sequence.arrival)
            self._leave(victim)
            victim.forget()
            self._queue(victim)
            victims.append(victim)
        return victims

    def _admit(self) -> bool:
        admitted = False
        while self.admitting and self._waiting and len(self.running) < self._max_running:
            sequence = self._head()
            if self._scarce and self._held([*self.running, sequence]) > self._budget - self._spared and self.running:
                break
            del self._waiting[sequence.arrival]
            self._admissions += 1
            self.running.append(sequence)
            self._siblings.setdefault(sequence.family, []).append(sequence)
            admitted = True
        return admitted

    def _head(self) -> S:
        """Who is admitted next: by priority, then arrival; at every fair turn by arrival alone."""
        if self._admissions % self._fair_every == self._fair_every - 1:
            while self._by_arrival[0] not in self._waiting:
                heapq.heappop(self._by_arrival)
            return self._waiting[self._by_arrival[0]]
        while self._by_priority[0][1] not in self._waiting:
            heapq.heappop(self._by_priority)
        return self._waiting[self._by_priority[0][1]]

    def _prefill(self) -> tuple[list[Copy[S]], list[Chunk[S]]]:
        """Copies and chunks for the sequences that do not decode yet, in order of admission."""
        budget = self._chunk_tokens
        copies: list[Copy[S]] = []
        chunks: list[Chunk[S]] = []
        busy: set[Hashable] = set()  # families of which one prefills in this step
        for sequence in self.running:
            if sequence.decoding:
                continue
            if sequence.cached == 0 and not sequence.whole:
                if sequence.family in busy:
                    continue
                source = self._source(sequence)
                if source is not None and not source.decoding and source.cached < source.prompt_len:
                    continue
                if source is not None and sequence.total > 1:
                    sequence.cached = min(sequence.prompt_len, sequence.total - 1, source.kv_len)
                    copies.append(Copy(source, sequence, sequence.cached))
                elif budget > 0:
                    sequence.cached = self._reuse(sequence)
            if sequence.total - sequence.cached == 1 and not sequence.whole:
                sequence.decoding = True
            elif budget > 0:
                chunk = self._chunk(sequence, budget)
                budget -= chunk.length
                chunks.append(chunk)
                busy.add(sequence.family)
        return copies, chunks

    def _source(self, sequence: S) -> S | None:
        """A sibling whose KV of the prompt is stored or being computed under the current weights."""
        siblings = self._siblings[sequence.family]
        if len(siblings) == 1:
            return None
        others = [s for s in siblings if s is not sequence and s.kv_len and not s.stale]
        return max(others, key=lambda s: s.kv_len, default=None)

    def _chunk(self, sequence: S, budget: int) -> Chunk[S]:
        start = sequence.cached
        length = min(budget, sequence.total - start)
        sequence.cached += length
        completes = sequence.cached == sequence.total
        followers: tuple[S, ...] = ()
        if completes:
            sequence.decoding = True
            if not sequence.drawn and not sequence.stale:
                followers = tuple(
                    s
                    for s in self._siblings[sequence.family]
                    if s is not sequence and not (s.decoding or s.cached or s.drawn or s.whole)
                )
            for follower in followers:
                follower.decoding = True
        return Chunk(sequence, start, length, completes, followers)
