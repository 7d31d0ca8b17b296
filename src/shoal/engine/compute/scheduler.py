"""Scheduler: the sequences that run, and the tokens that each computes in the next step.

Pure: no torch, no clock, no I/O.

A sequence is one completion being sampled. It waits, runs (holds KV), and leaves. A running sequence either *prefills*,
which computes the KV of known tokens a chunk at a time, or *decodes* one token per step. Dropping its KV (interruption,
pre-emption) sends it back to prefilling prompt and sampled tokens, and never loses a token.

No sequence starves. Every `fair_every`-th admission takes the sequence that has waited longest, of any priority.
A sequence that does not fit stops the queue instead of being overtaken. Memory is taken from the latest arrival only,
so the oldest running sequence always finishes.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Generic, TypeVar


@dataclass(slots=True, eq=False)
class SequenceState:
    """State of one sequence. Siblings are sequences with one prompt, whose KV is computed once.

    Invariant: while `decoding`, KV is stored for all tokens but the last.
    """

    request_id: int
    prompt_len: int
    priority: int = 0
    arrival: int = -1
    sampled: list[int] = field(default_factory=list)
    cached: int = 0
    """Tokens whose KV is stored, while prefilling."""
    decoding: bool = False
    stale: bool = False
    """Whether some of the KV was computed under older weights."""
    prompt_key: Hashable = None
    """Key that equal prompts share; None makes only sequences of one request siblings."""
    whole: bool = False
    """Whether the sequence computes its tokens itself instead of copying a sibling's KV."""

    @property
    def family(self) -> Hashable:
        """Key that siblings share."""
        return self.request_id if self.prompt_key is None else self.prompt_key

    @property
    def total(self) -> int:
        """Tokens known: prompt and sampled."""
        return self.prompt_len + len(self.sampled)

    @property
    def kv_len(self) -> int:
        """Tokens whose KV is stored."""
        return self.total - 1 if self.decoding else self.cached

    def forget(self) -> None:
        """Drops the KV: all known tokens are prefilled again."""
        self.cached, self.decoding, self.stale = 0, False, False


S = TypeVar("S", bound=SequenceState)

SPARED = 8
"""Tokens of scarce memory per token that admission leaves free for running sequences to grow. Without this reserve,
pre-emptions are four to seven times as frequent, and storage is laid out again two to four times as often."""


@dataclass(frozen=True, slots=True)
class Copy(Generic[S]):
    """Copy of the KV of a sibling's first `length` tokens, made before the step."""

    source: S
    target: S
    length: int


@dataclass(frozen=True, slots=True)
class Chunk(Generic[S]):
    """Known tokens `start : start + length` of a sequence, prefilled in this step.

    When `completes`, the last position samples the next token. `followers` are new siblings that copy the prompt's KV
    after the step and sample their first token from the same logits.
    """

    sequence: S
    start: int
    length: int
    completes: bool
    followers: tuple[S, ...]


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[S]):
    """Work of one step. While only decoding continues, `plan` returns the same object again."""

    preempted: tuple[S, ...]
    copies: tuple[Copy[S], ...]
    chunks: tuple[Chunk[S], ...]
    decode: tuple[S, ...]

    @property
    def sequences(self) -> list[S]:
        """Sequences whose KV the step writes."""
        chunked = (s for chunk in self.chunks for s in (chunk.sequence, *chunk.followers))
        return [*self.decode, *chunked, *(copy.target for copy in self.copies)]

    @property
    def empty(self) -> bool:
        """Whether the step computes nothing."""
        return not (self.chunks or self.decode)


class Scheduler(Generic[S]):
    """Admission, chunked prefill and pre-emption.

    `capacity(tokens)` is the storage that this many tokens occupy. `reuse(sequence)` returns how many of the sequence's
    first tokens have KV that will be in place when the plan is computed; never all. Without `copies` no part of what a
    sequence stored can be copied: siblings share a prompt that completes, and nothing else.
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
        copies: bool = True,
        fair_every: int = 8,
    ) -> None:
        assert kv_budget_tokens >= capacity(max_model_len), "one sequence of full length must fit"
        self.running: list[S] = []
        self.admitting = True
        self._max_running = max_running
        self._budget = kv_budget_tokens
        self._chunk_tokens = chunk_tokens
        self._capacity = capacity
        self._reuse, self._copies = reuse, copies
        self._fair_every = fair_every
        self._scarce = max_running * capacity(max_model_len) > kv_budget_tokens
        self._spared = kv_budget_tokens // SPARED
        self._waiting: dict[int, S] = {}  # by arrival
        self._by_priority: list[tuple[int, int]] = []  # heaps; entries of sequences that left stay in
        self._by_arrival: list[int] = []
        self._arrivals = 0
        self._admissions = 0
        self._siblings: dict[Hashable, list[S]] = {}  # running sequences, by family
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
        """Removes a sequence, finished or not, running or not."""
        if self._waiting.pop(sequence.arrival, None) is None:
            self._leave(sequence)

    def forget(self, sequences: Iterable[S]) -> None:
        """Drops the KV of running sequences."""
        for sequence in sequences:
            sequence.forget()
        self._plan = None

    def mark_stale(self, sequences: Iterable[S]) -> None:
        """Marks the stored KV as computed under older weights, so that no sibling copies it."""
        for sequence in sequences:
            sequence.stale = sequence.kv_len > 0
        self._plan = None

    def plan(self) -> StepPlan[S]:
        """Plan of the next step.

        The caller then samples a token for each sequence in `decode` and each completing chunk.
        """
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
        """Sends the latest arrivals back to the queue until each running sequence has room for one more token."""
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
        """Sequence to admit next: by priority, then arrival; at every fair turn by arrival alone."""
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
        busy: set[Hashable] = set()  # families with a sequence that prefills
        stored: dict[int, int] = {}  # tokens stored before the step, of each sequence that gets more in it, by id
        for sequence in self.running:
            if sequence.decoding:
                continue
            if sequence.cached == 0 and not sequence.whole:
                source, length = self._source(sequence, stored)
                follows = self._copies or not sequence.sampled
                if follows and length < sequence.prompt_len and sequence.family in busy:
                    continue
                if source is not None and sequence.total > 1:
                    sequence.cached = min(sequence.prompt_len, sequence.total - 1, length)
                    copies.append(Copy(source, sequence, sequence.cached))
                    stored[id(sequence)] = 0  # all copies are made at once
                elif budget > 0:
                    sequence.cached = self._reuse(sequence)
            if sequence.total - sequence.cached == 1 and not sequence.whole and (self._copies or sequence.cached):
                sequence.decoding = True
                continue
            busy.add(sequence.family)
            if budget > 0:
                chunk = self._chunk(sequence, budget)
                budget -= chunk.length
                chunks.append(chunk)
                stored.setdefault(id(sequence), chunk.start)
        return copies, chunks

    def _source(self, sequence: S, stored: Mapping[int, int]) -> tuple[S | None, int]:
        """Sibling with the most tokens stored under the current weights, and their number; `stored` overrides it."""
        siblings = self._siblings[sequence.family]
        if len(siblings) == 1 or not self._copies:
            return None, 0
        lengths = ((stored.get(id(s), s.kv_len), s) for s in siblings if s is not sequence and not s.stale)
        length, source = max(lengths, key=itemgetter(0), default=(0, None))
        return (source, length) if length else (None, 0)

    def _chunk(self, sequence: S, budget: int) -> Chunk[S]:
        start = sequence.cached
        length = min(budget, sequence.total - start)
        sequence.cached += length
        completes = sequence.cached == sequence.total
        followers: tuple[S, ...] = ()
        if completes:
            sequence.decoding = True
            if not sequence.sampled and not sequence.stale:
                followers = tuple(
                    s
                    for s in self._siblings[sequence.family]
                    if s is not sequence and not (s.decoding or s.cached or s.sampled or s.whole)
                )
            for follower in followers:
                follower.decoding = True
        return Chunk(sequence, start, length, completes, followers)
