"""KV storage in size classes.

Each size class is a `Pool` of slots with room for `capacity` tokens; a sequence that outgrows its slot moves to the
next class, twice as large. So storage and attention are at most twice what the tokens need, whatever the longest
sequence is, and decoding reads views of the storage instead of gathered copies.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.engine.scheduler import SequenceState

SMALLEST_CAPACITY = 32
"""With lengths that vary much, 32 draws 23 % more tokens/s than 128 (128 rows, 5M parameters, one core): attention
pads to the longest row of a pool."""
StoredKV: TypeAlias = dict[int, tuple[Tensor, Tensor]]
"""K and V of [K, L, D] by layer, apart from any slot."""
FEWEST_SLOTS = 4  # that a pool has storage for; a power of two
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
        self.allocated = FEWEST_SLOTS
        """Slots that there is storage for, a power of two. It grows into new storage."""
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
        if len(self.slots) > self.allocated:
            self.allocated *= 2
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

    def copy(self, source_slots: Sequence[int], target: "Pool", target_slots: Sequence[int], length: int) -> None:
        """Copies the KV of the first `length` tokens of slots into slots of this or another pool."""
        if length == 0:
            return
        for layer, (k, v) in self._layers.items():
            source_N = torch.tensor(source_slots, device=k.device)
            target_N = torch.tensor(target_slots, device=k.device)
            k_target, v_target = target.layer(layer, k[0].transpose(0, 1), v[0].transpose(0, 1))
            for x, x_target in ((k, k_target), (v, v_target)):
                x_target[:, :, :length].index_copy_(0, target_N, x[:, :, :length].index_select(0, source_N))

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

    def zero(self) -> None:
        """Overwrites everything that is stored."""
        for k, v in self._layers.values():
            k.zero_()
            v.zero_()

    def close_hole(self) -> tuple[SequenceState, int] | None:
        """Moves the last sequence into a hole when holes are many; returns it with its new slot."""
        if len(self._free) * SPARSE <= len(self.slots):
            return None
        last = len(self.slots) - 1
        sequence = self.slots[last]
        assert sequence is not None, "the last slot is never a hole"
        slot = self._free.pop()
        self.copy([last], self, [slot], sequence.kv_len)
        self.slots[slot] = sequence
        self.release(last)
        return sequence, slot

    def _empty_like(self, x_TKD: Tensor) -> Tensor:
        shape = (self.allocated, x_TKD.shape[1], self.capacity, x_TKD.shape[2])
        return zeros_on_demand(shape, x_TKD.dtype, x_TKD.device)

    def _grown(self, x_SKCD: Tensor) -> Tensor:
        larger = zeros_on_demand((self.allocated, *x_SKCD.shape[1:]), x_SKCD.dtype, x_SKCD.device)
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
        if place is not None:
            self._move(place[0], pool, [sequence])
        else:
            self._places[id(sequence)] = pool, pool.take(sequence)
        return self._places[id(sequence)]

    def place_all(self, sequences: Sequence[SequenceState]) -> None:
        """Gives each a place as `place` does. Those that outgrow a pool together move together."""
        moves: dict[tuple[Pool, Pool], list[SequenceState]] = {}
        for sequence in sequences:
            place = self._places.get(id(sequence))
            if place is not None and sequence.total > place[0].capacity:
                moves.setdefault((place[0], self._pool(sequence.total)), []).append(sequence)
        for (source, target), movers in moves.items():
            self._move(source, target, movers)
        for sequence in sequences:
            self.place(sequence)

    def _move(self, source: Pool, target: Pool, movers: Sequence[SequenceState]) -> None:
        slots = [self._places[id(sequence)][1] for sequence in movers]
        for sequence in movers:
            self._places[id(sequence)] = target, target.take(sequence)
        target_slots = [self._places[id(sequence)][1] for sequence in movers]
        source.copy(slots, target, target_slots, max(sequence.kv_len for sequence in movers))
        for slot in slots:
            source.release(slot)

    def release(self, sequence: SequenceState) -> None:
        """Gives up a sequence's slot, if it has one."""
        place = self._places.pop(id(sequence), None)
        if place is not None:
            place[0].release(place[1])

    def copy_prefixes(self, copies: Iterable[tuple[SequenceState, SequenceState, int]]) -> None:
        """Gives each (source, target, length) the target the KV of the first `length` tokens of the source."""
        together: dict[tuple[Pool, Pool, int], tuple[list[int], list[int]]] = {}
        for source, target, length in copies:
            target_pool, target_slot = self.place(target)
            source_pool, source_slot = self._places[id(source)]
            sources, targets = together.setdefault((source_pool, target_pool, length), ([], []))
            sources.append(source_slot)
            targets.append(target_slot)
        for (source_pool, target_pool, length), (sources, targets) in together.items():
            source_pool.copy(sources, target_pool, targets, length)

    def exported(self, sequence: SequenceState, length: int) -> "StoredKV | None":
        """A copy of the KV of a sequence's first `length` tokens; None when it has no slot."""
        place = self._places.get(id(sequence))
        return None if place is None else place[0].exported(place[1], length)

    def restore(self, stored: "StoredKV", sequence: SequenceState, length: int) -> None:
        """Gives a sequence the first `length` tokens of what was exported."""
        pool, slot = self.place(sequence)
        pool.restore(stored, slot, length)

    @torch.inference_mode()
    def zero(self) -> None:
        """Overwrites all KV: weights that overflow leave infinities, which hiding does not keep out of a sum."""
        for pool in self.pools:
            pool.zero()

    def close_holes(self) -> None:
        """Keeps the slots in use together at the front of each pool."""
        for pool in self.pools:
            while (moved := pool.close_hole()) is not None:
                self._places[id(moved[0])] = pool, moved[1]

    def _pool(self, tokens: int) -> Pool:
        return next(pool for pool in self.pools if tokens <= pool.capacity)
