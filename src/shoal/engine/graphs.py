"""Decode steps captured as graphs and replayed: on a GPU, launching a small model's kernels takes longer than they run.

A graph fixes every shape and address. So a captured step computes the first slots of each pool in use, holes too,
and attends over the whole slot with what lies behind hidden; what differs between steps is in tensors that stay where
they are: tokens, positions, weights, KV. The number of slots is rounded up to a power of two, so that few graphs
serve many batches.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from shoal.engine.cache import FEWEST_SLOTS, Pool
from shoal.engine.forward import Forward
from shoal.engine.layout import CachedRows, SlotRows

LOG = logging.getLogger(__name__)

MOST_GRAPHS = 64
Step: TypeAlias = Callable[[], None]
Key: TypeAlias = tuple[tuple[Pool, int, int], ...]
"""Of each pool in use, which storage it has and how many slots are computed."""


class Capture(Protocol):
    """How a step becomes a graph."""

    def __call__(self, step: Step) -> Step:
        """Runs `step` once and captures it. What is returned does it again, on what its tensors hold by then.

        Raises `RuntimeError` when the step cannot be captured; it may have run.
        """
        ...


class CudaCapture:
    """Captures CUDA graphs, which share the memory of what lies between their inputs and outputs."""

    def __init__(self, device: torch.device | str) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """See `Capture`."""
        stream, graph = self._stream, torch.cuda.CUDAGraph()
        with torch.cuda.device(stream.device):
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    step()  # what libraries set up at their first call may not be captured
                # Another thread may be checking new weights meanwhile: its calls are none of this capture's business.
                with torch.cuda.graph(graph, self._memory, stream, capture_error_mode="thread_local"):
                    step()
            finally:  # a capture that fails may leave its own stream behind as the current one
                torch.cuda.set_stream(current)
                current.wait_stream(stream)
        return graph.replay


class DecodeGraphs:
    """The graphs of one forward, and the tensors that all of them read from and write to. Not thread-safe."""

    def __init__(self, forward: Forward, capture: Capture, most_rows: int, device: torch.device) -> None:
        """Steps of more than `most_rows` rows, holes and rounding included, are not captured."""
        self._forward = forward
        self._capture: Capture | None = capture
        self._token_M = torch.zeros(most_rows, dtype=torch.long, device=device)
        self._position_M = torch.zeros(most_rows, dtype=torch.long, device=device)
        self._logits_MV: Tensor | None = None
        self._graphs: OrderedDict[Key, Step] = OrderedDict()
        self.steps = 0
        """How many were replayed."""

    def begun(self, slots: Sequence[tuple[Pool, int]], token_B: Tensor, position_B: Tensor) -> "DecodeSteps | None":
        """Steps of all sequences there are, sorted by pool; None when they cannot be replayed.

        Each is given the token at its position, whose KV is not stored yet.
        """
        spans: list[tuple[Pool, int]] = []
        rows: list[int] = []
        for pool, held in groupby(slots, key=lambda place: place[0]):
            used = [slot for _, slot in held]
            assert pool.held == len(used), "a sequence that does not decode would be written to"
            before = sum(span for _, span in spans)
            rows += [before + slot for slot in used]
            spans.append((pool, min(max(FEWEST_SLOTS, 1 << max(used).bit_length()), pool.allocated)))
        count = sum(span for _, span in spans)
        if self._capture is None or count > len(self._token_M):
            return None
        row_B = torch.tensor(rows, device=token_B.device)
        for x_M, x_B in ((self._token_M, token_B), (self._position_M, position_B)):
            x_M[:count] = 0
            x_M.index_copy_(0, row_B, x_B)
        return DecodeSteps(self, spans, row_B)

    def advance(self, row_B: Tensor, token_B: Tensor) -> None:
        """What these rows are given next: the tokens drawn, one position later."""
        self._token_M.index_copy_(0, row_B, token_B)
        self._position_M.index_add_(0, row_B, torch.ones_like(row_B))

    def logits(self, spans: Sequence[tuple[Pool, int]]) -> Tensor:
        """[T, V] of one row for each slot, valid until the next call."""
        key = tuple((pool, pool.storage, span) for pool, span in spans)
        replay = self._graphs.get(key)
        if replay is not None:
            self._graphs.move_to_end(key)
            replay()
            self.steps += 1
        else:
            self._captured(key, lambda: self._computed(spans))
        assert self._logits_MV is not None
        return self._logits_MV[: sum(span for _, span in spans)]

    def _captured(self, key: Key, step: Step) -> None:
        """Computes a step, so that it can be replayed from now on. Graphs of storage that is gone go."""
        for stale in [key for key in self._graphs if any(pool.storage != storage for pool, storage, _ in key)]:
            del self._graphs[stale]
        if self._capture is not None:
            try:
                self._graphs[key] = self._capture(step)
            except RuntimeError as error:
                LOG.warning("decode steps cannot be captured, and are launched one kernel at a time: %s", error)
                self._capture = None
                self._graphs.clear()
        if self._capture is None:  # not in the handler, where the error keeps what the failed step had made
            step()
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)

    def _computed(self, spans: Sequence[tuple[Pool, int]]) -> None:
        parts, end = [], 0
        for pool, span in spans:
            parts.append(SlotRows(pool, self._position_M[end : end + span]))
            end += span
        logits_TV = self._forward(self._token_M[:end], self._position_M[:end], CachedRows(parts), None)
        if self._logits_MV is None:
            self._logits_MV = logits_TV.new_empty(len(self._token_M), logits_TV.shape[1])
        self._logits_MV[:end] = logits_TV


class DecodeSteps:
    """Steps of the same sequences, one after another."""

    def __init__(self, graphs: DecodeGraphs, spans: Sequence[tuple[Pool, int]], row_B: Tensor) -> None:
        self._graphs = graphs
        self._spans = spans
        self._row_B = row_B

    def logits(self) -> Tensor:
        """[B, V] of the sequences, in the order in which they were given."""
        return self._graphs.logits(self._spans).index_select(0, self._row_B)

    def advance(self, token_B: Tensor) -> None:
        """Goes on to the next step with the tokens drawn."""
        self._graphs.advance(self._row_B, token_B)
