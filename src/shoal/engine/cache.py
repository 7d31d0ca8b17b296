"""KV storage in size classes, and how the tokens of one step attend to it.

Each size class is a `Pool` of slots with room for `capacity` tokens; a sequence that outgrows its slot moves to the
next class, twice as large. So storage and attention are at most twice what the tokens need, whatever the longest
sequence is, and decoding reads views of the storage instead of gathered copies.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.engine.scheduler import SequenceState

SMALLEST_CAPACITY = 32
"""With lengths that vary much, 32 draws 23 % more tokens/s than 128 (128 rows, 5M parameters, one core): attention
pads to the longest row of a pool. With equal lengths the moves cost 2 %."""
StoredKV: TypeAlias = dict[int, tuple[Tensor, Tensor]]
"""K and V of [K, L, D] by layer, apart from any slot."""
SPARSE = 8  # holes are closed when they are more than one in so many slots


def zeros_on_demand(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on a CPU occupy memory only once written to (calloc maps the pages lazily; `torch.zeros` writes)."""
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size_bytes, dtype=np.uint8)).view(dtype).view(tuple(shape))


class Pool:
    """Slots for sequences of up to `capacity` tokens; per layer one K and one V of [S, K, capacity, D]."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: list[SequenceState | None] = []
        self._free: list[int] = []
        self._allocated = 4
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def held(self) -> int:
        """Sequences in the pool."""
        return len(self.slots) - len(self._free)

    def take(self, sequence: SequenceState) -> int:
        """A slot for a sequence: a hole if there is one."""
        if self._free:
            slot = self._free.pop()
            self.slots[slot] = sequence
            return slot
        self.slots.append(sequence)
        if len(self.slots) > self._allocated:
            self._allocated *= 2
            self._layers = {layer: (self._grown(k), self._grown(v)) for layer, (k, v) in self._layers.items()}
        return len(self.slots) - 1

    def release(self, slot: int) -> None:
        """Makes a slot a hole."""
        self.slots[slot] = None
        self._free.append(slot)
        while self.slots and self.slots[-1] is None:
            self.slots.pop()
        self._free = [hole for hole in self._free if hole < len(self.slots)]

    def layer(self, layer: int, key_TKD: Tensor, value_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """K and V storage [S, K, capacity, D] of a layer, made to fit the first keys seen."""
        stored = self._layers.get(layer)
        if stored is None:
            stored = self._empty_like(key_TKD), self._empty_like(value_TKD)
            self._layers[layer] = stored
        return stored

    def copy(self, source_slot: int, target: "Pool", target_slot: int, length: int) -> None:
        """Copies the KV of the first `length` tokens into a slot of this or another pool."""
        if length == 0:
            return
        for layer, (k, v) in self._layers.items():
            k_target, v_target = target.layer(layer, k[0].transpose(0, 1), v[0].transpose(0, 1))
            k_target[target_slot, :, :length] = k[source_slot, :, :length]
            v_target[target_slot, :, :length] = v[source_slot, :, :length]

    def exported(self, slot: int, length: int) -> StoredKV:
        """A copy of the KV of the first `length` tokens in a slot."""
        return {
            layer: (k[slot, :, :length].clone(), v[slot, :, :length].clone()) for layer, (k, v) in self._layers.items()
        }

    def restore(self, stored: StoredKV, slot: int, length: int) -> None:
        """Puts the first `length` tokens of what was exported into a slot."""
        for layer, (k_KLD, v_KLD) in stored.items():
            k, v = self.layer(layer, k_KLD.transpose(0, 1), v_KLD.transpose(0, 1))
            k[slot, :, :length] = k_KLD[:, :length]
            v[slot, :, :length] = v_KLD[:, :length]

    def close_hole(self) -> tuple[SequenceState, int] | None:
        """Moves the last sequence into a hole when holes are many; returns it with its new slot."""
        if len(self._free) * SPARSE <= len(self.slots):
            return None
        last = len(self.slots) - 1
        sequence = self.slots[last]
        assert sequence is not None, "the last slot is never a hole"
        slot = self._free.pop()
        self.copy(last, self, slot, sequence.kv_len)
        self.slots[slot] = sequence
        self.release(last)
        return sequence, slot

    def _empty_like(self, x_TKD: Tensor) -> Tensor:
        shape = (self._allocated, x_TKD.shape[1], self.capacity, x_TKD.shape[2])
        return zeros_on_demand(shape, x_TKD.dtype, x_TKD.device)

    def _grown(self, x_SKCD: Tensor) -> Tensor:
        larger = zeros_on_demand((self._allocated, *x_SKCD.shape[1:]), x_SKCD.dtype, x_SKCD.device)
        for slot, sequence in enumerate(self.slots[: x_SKCD.shape[0]]):
            if sequence is not None:
                larger[slot, :, : sequence.kv_len] = x_SKCD[slot, :, : sequence.kv_len]
        return larger


class KVCache:
    """Where each sequence's KV lies."""

    def __init__(self, max_model_len: int) -> None:
        capacities = [min(SMALLEST_CAPACITY, max_model_len)]
        while capacities[-1] < max_model_len:
            capacities.append(min(2 * capacities[-1], max_model_len))
        self.pools = [Pool(capacity) for capacity in capacities]
        self._places: dict[int, tuple[Pool, int]] = {}  # by id of the sequence

    def capacity(self, tokens: int) -> int:
        """Tokens of storage that a sequence of so many tokens occupies."""
        return self._pool(tokens).capacity

    def place(self, sequence: SequenceState) -> tuple[Pool, int]:
        """The pool and slot of a sequence, with room for all its known tokens; moved or newly taken if need be."""
        place = self._places.get(id(sequence))
        if place is not None and sequence.total <= place[0].capacity:
            return place
        pool = self._pool(sequence.total)
        slot = pool.take(sequence)
        if place is not None:
            place[0].copy(place[1], pool, slot, sequence.kv_len)
            place[0].release(place[1])
        self._places[id(sequence)] = pool, slot
        return pool, slot

    def release(self, sequence: SequenceState) -> None:
        """Gives up a sequence's slot, if it has one."""
        place = self._places.pop(id(sequence), None)
        if place is not None:
            place[0].release(place[1])

    def copy_prefix(self, source: SequenceState, target: SequenceState, length: int) -> None:
        """Gives `target` the KV of the first `length` tokens of `source`."""
        source_pool, source_slot = self._places[id(source)]
        target_pool, target_slot = self.place(target)
        source_pool.copy(source_slot, target_pool, target_slot, length)

    def exported(self, sequence: SequenceState, length: int) -> "StoredKV | None":
        """A copy of the KV of a sequence's first `length` tokens; None when it has no slot."""
        place = self._places.get(id(sequence))
        return None if place is None else place[0].exported(place[1], length)

    def restore(self, stored: "StoredKV", sequence: SequenceState, length: int) -> None:
        """Gives a sequence the first `length` tokens of what was exported."""
        pool, slot = self.place(sequence)
        pool.restore(stored, slot, length)

    def close_holes(self) -> None:
        """Keeps the slots in use together at the front of each pool."""
        for pool in self.pools:
            while (moved := pool.close_hole()) is not None:
                self._places[id(moved[0])] = pool, moved[1]

    def _pool(self, tokens: int) -> Pool:
        return next(pool for pool in self.pools if tokens <= pool.capacity)


class DecodeRows:
    """Rows of one forward, one token each, of sequences in one pool. `advance` makes them the next step's."""

    def __init__(self, pool: Pool, slots: Sequence[int], positions: Sequence[int], device: torch.device) -> None:
        self.count = len(slots)
        self.longest = max(positions) + 1
        self._pool = pool
        self._uniform = min(positions) == max(positions)
        self._span = max(slots) + 1
        self._dense = list(slots) == list(range(len(slots)))
        self._slot_N = torch.tensor(slots, device=device)
        self._position_N = torch.tensor(positions, device=device)
        self._row_by_heads: dict[int, Tensor] = {}  # flat row of each (head, token) in [S * K * capacity, D]
        self._mask_by_window: dict[int | None, Tensor | None] = {}

    @property
    def fits(self) -> bool:
        """Whether every sequence still has room for this step's token."""
        return self.longest <= self._pool.capacity

    def advance(self) -> None:
        """The same sequences, one token later."""
        self.longest += 1
        self._position_N += 1
        self._mask_by_window.clear()
        for row_KN in self._row_by_heads.values():
            row_KN.add_(1)

    def attend(
        self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Stores the new keys and values, then attends over each sequence: [N, H, D]."""
        k_SKCD, v_SKCD = self._pool.layer(layer, key_NKD, value_NKD)
        self._store(k_SKCD, key_NKD)
        self._store(v_SKCD, value_NKD)
        heads = key_NKD.shape[1]
        q_NKGD = query_NHD.view(query_NHD.shape[0], heads, -1, query_NHD.shape[2])
        if not self._dense:
            q_NKGD = q_NKGD.new_zeros((self._span, *q_NKGD.shape[1:])).index_copy_(0, self._slot_N, q_NKGD)
        out_NKGD = F.scaled_dot_product_attention(
            q_NKGD,
            k_SKCD[: self._span, :, : self.longest],
            v_SKCD[: self._span, :, : self.longest],
            attn_mask=self._mask(window, query_NHD.dtype),
            scale=scaling,
        )
        if not self._dense:
            out_NKGD = out_NKGD.index_select(0, self._slot_N)
        return out_NKGD.flatten(1, 2)

    def _store(self, stored_SKCD: Tensor, new_NKD: Tensor) -> None:
        if self._uniform and self._dense:
            stored_SKCD[: self._span, :, self.longest - 1] = new_NKD
            return
        _, heads, capacity, width = stored_SKCD.shape
        row_KN = self._row_by_heads.get(heads)
        if row_KN is None:
            head_K1 = torch.arange(heads, device=new_NKD.device)[:, None]
            row_KN = ((self._slot_N * heads + head_K1) * capacity + self._position_N).flatten()
            self._row_by_heads[heads] = row_KN
        stored_SKCD.view(-1, width).index_copy_(0, row_KN, new_NKD.transpose(0, 1).reshape(-1, width))

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[S, 1, 1, longest] 0 where a sequence may look, -inf elsewhere; None when all may look everywhere."""
        if window is not None and window >= self.longest:
            window = None
        if window not in self._mask_by_window:
            self._mask_by_window[window] = self._new_mask(window, dtype)
        return self._mask_by_window[window]

    def _new_mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        if self._uniform and self._dense and window is None:
            return None
        position_S = self._position_N
        if not self._dense:  # holes look at their first token: a row without any would be NaN
            position_S = position_S.new_zeros(self._span).index_copy_(0, self._slot_N, position_S)
        at_L = torch.arange(self.longest, device=position_S.device)
        hidden_SL = at_L > position_S[:, None]
        if window is not None:
            hidden_SL |= at_L <= position_S[:, None] - window
        return torch.zeros(hidden_SL.shape, dtype=dtype, device=position_S.device).masked_fill_(hidden_SL, -torch.inf)[
            :, None, None, :
        ]


class ChunkRows:
    """Rows of one forward: `count` chunks of `length` known tokens each, all starting at token `start`.

    More than one chunk only when they start at 0: fresh prompts of equal length attend in one call without padding.
    """

    def __init__(self, places: Sequence[tuple[Pool, int]], start: int, length: int) -> None:
        assert len(places) == 1 or start == 0
        self.count = len(places) * length
        self._places = places
        self._start = start
        self._length = length

    def attend(
        self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Stores the new keys and values, then attends to what came before: [N, H, D]."""
        start, end = self._start, self._start + self._length
        q, k, v = (
            x.reshape(-1, self._length, *x.shape[1:]).transpose(1, 2) for x in (query_NHD, key_NKD, value_NKD)
        )  # [chunks, heads, length, D]
        for i, (pool, slot) in enumerate(self._places):
            k_SKCD, v_SKCD = pool.layer(layer, key_NKD, value_NKD)
            k_SKCD[slot, :, start:end] = k[i]
            v_SKCD[slot, :, start:end] = v[i]
            if start:
                k, v = k_SKCD[slot : slot + 1, :, :end], v_SKCD[slot : slot + 1, :, :end]
        masked = start > 0 or (window is not None and window < end)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self._mask(window, q.device) if masked else None,
            is_causal=not masked,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None, device: torch.device) -> Tensor:
        at_L = torch.arange(self._start + self._length, device=device)
        distance = at_L[self._start :, None] - at_L
        visible = distance >= 0
        return visible if window is None else visible & (distance < window)


class CachedRows:
    """The `Layout` of one step: decoding rows first, pool by pool, then chunks."""

    def __init__(self, parts: Sequence[DecodeRows | ChunkRows]) -> None:
        self._parts = parts

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Attention of every part over its own rows: [T, H, D]."""
        if len(self._parts) == 1:
            return self._parts[0].attend(layer, query_THD, key_TKD, value_TKD, scaling, window)
        outs, start = [], 0
        for part in self._parts:
            end = start + part.count
            q, k, v = query_THD[start:end], key_TKD[start:end], value_TKD[start:end]
            outs.append(part.attend(layer, q, k, v, scaling, window))
            start = end
        return torch.cat(outs)
