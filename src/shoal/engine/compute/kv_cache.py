"""KV storage in size classes.

Each size class is a `Pool` of slots with room for `capacity` tokens. A sequence that outgrows its slot moves to the
next class, which is twice as large. Attention therefore covers at most twice the tokens needed, and decoding reads
views of the storage instead of gathered copies.

All pools together store at most a budget of tokens. A pool doubles while the budget allows it. When it does not, empty
pools give up their storage. If that is not enough, all pools are laid out again: each gets the slots it needs and a
share of the rest. Sequences that fit slot by slot therefore always have room, and the scheduler checks only that.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.engine.compute.scheduler import SequenceState
from shoal.engine.compute.states import OfSequence, States

SMALLEST_CAPACITY = 32
"""Tokens. With widely varying lengths, 32 samples 23 % more tokens/s than 128 (128 rows, 5M parameters, one core),
because attention pads to the longest row of a pool."""
LayerKV: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Stored:
    """KV and states of a sequence's first `length` tokens, copied out of its slot."""

    length: int
    layers: dict[int, LayerKV]
    """K and V [K, L, D] by layer."""
    states: OfSequence

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        kv_bytes = sum(k_KLD.nbytes + v_KLD.nbytes for k_KLD, v_KLD in self.layers.values())
        return kv_bytes + sum(state.size_bytes for state in self.states.values())

    def usable(self, length: int) -> int:
        """Number of tokens that serve a sequence with the same first `length` tokens: states serve whole."""
        return 0 if self.states and length < self.length else min(length, self.length)


FEWEST_SLOTS = 4  # slots of a new pool, or fewer if they hold more than FEWEST_TOKENS; a power of two
FEWEST_TOKENS = 4096
SPARSE = 8  # slots per hole: holes are closed when they are more frequent


def zeros_on_demand(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that occupy CPU memory only once written to (calloc maps pages lazily; `torch.zeros` writes them)."""
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size_bytes, dtype=np.uint8)).view(dtype).view(tuple(shape))


class Pool:
    """Slots for sequences of up to `capacity` tokens; each layer has one K and one V of [S, K, capacity, D]."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: list[SequenceState | None] = []
        self._free: list[int] = []
        self.allocated = 0
        """Slots with storage."""
        self.layers: dict[int, LayerKV] = {}
        """K and V of the layers used so far."""

    @property
    def held(self) -> int:
        """Sequences in the pool."""
        return len(self.slots) - len(self._free)

    def take(self, sequence: SequenceState) -> int:
        """Gives the sequence a slot, and returns it; holes are reused first."""
        if self._free:
            slot = self._free.pop()
            self.slots[slot] = sequence
            return slot
        assert len(self.slots) < self.allocated, "no storage for another slot"
        self.slots.append(sequence)
        return len(self.slots) - 1

    @torch.inference_mode()
    def clear(self, slot: int, length: int) -> None:
        """Zeroes the KV of the first `length` tokens in a slot."""
        for stored in self.layers.values():
            for x in stored:
                x[slot, :, :length].zero_()

    def release(self, slot: int, length: int) -> None:
        """Makes a slot, in which at most `length` tokens were written, a hole."""
        self.clear(slot, length)
        self.slots[slot] = None
        self._free.append(slot)
        while self.slots and self.slots[-1] is None:
            self.slots.pop()
        self._free = [hole for hole in self._free if hole < len(self.slots)]

    def lay_out(self, allocated: int, sequences: Sequence[SequenceState]) -> None:
        """Assigns the first of `allocated` slots to these sequences; the caller then fills the new storage."""
        assert len(sequences) <= allocated
        self.allocated = allocated
        self.slots, self._free = list(sequences), []

    def layer(self, layer: int, key_TKD: Tensor, value_TKD: Tensor) -> LayerKV:
        """K and V storage [S, K, capacity, D] of a layer, made to fit the first keys seen."""
        stored = self.layers.get(layer)
        if stored is None:
            stored = self._empty_like(key_TKD), self._empty_like(value_TKD)
            self.layers[layer] = stored
        return stored

    def copy(self, source_slots: Sequence[int], target: "Pool", target_slots: Sequence[int], length: int) -> None:
        """Copies the KV of the first `length` tokens of slots into slots of this or another pool."""
        if length == 0:
            return
        for layer, stored in self.layers.items():
            target.copy_layer(layer, stored, source_slots, target_slots, length)

    def copy_layer(
        self, layer: int, stored: LayerKV, source_slots: Sequence[int], slots: Sequence[int], length: int
    ) -> None:
        """Copies the first `length` tokens of a layer's slots in other storage into slots of this pool."""
        k, v = stored
        into = self.layer(layer, k[0].transpose(0, 1), v[0].transpose(0, 1))
        in_place = list(source_slots) == list(slots) == list(range(len(slots)))
        source_N = torch.tensor(source_slots, device=k.device)
        target_N = torch.tensor(slots, device=k.device)
        for x, x_target in zip(stored, into, strict=True):
            if in_place:  # pools that only grow keep their slots: no copy in between
                x_target[: len(slots), :, :length] = x[: len(slots), :, :length]
            else:
                x_target[:, :, :length].index_copy_(0, target_N, x[:, :, :length].index_select(0, source_N))

    def close_hole(self) -> tuple[SequenceState, int] | None:
        """Moves the last sequence into a hole when holes are many; returns the sequence and its new slot."""
        if len(self._free) * SPARSE <= len(self.slots):
            return None
        last = len(self.slots) - 1
        sequence = self.slots[last]
        assert sequence is not None, "the last slot is never a hole"
        slot = self._free.pop()
        self.copy([last], self, [slot], sequence.kv_len)
        self.slots[slot] = sequence
        self.release(last, sequence.total)
        return sequence, slot

    def _empty_like(self, x_TKD: Tensor) -> Tensor:
        shape = (self.allocated, x_TKD.shape[1], self.capacity, x_TKD.shape[2])
        return zeros_on_demand(shape, x_TKD.dtype, x_TKD.device)


class KVCache:
    """KV of all sequences, each in a slot of one pool.

    Invariant: storage without KV is zero. Attention multiplies hidden values by 0, and 0 times infinity is NaN.

    Invariant: the pools store at most `budget_tokens` tokens, plus one layer while they are laid out again. Requires
    that the smallest slots that fit all placed sequences hold at most `budget_tokens` tokens.
    """

    def __init__(self, max_model_len: int, budget_tokens: int) -> None:
        capacities = [min(SMALLEST_CAPACITY, max_model_len)]
        while capacities[-1] < max_model_len:
            capacities.append(min(2 * capacities[-1], max_model_len))
        self.pools = [Pool(capacity) for capacity in capacities]
        self._budget = budget_tokens
        self._places: dict[int, tuple[Pool, int]] = {}  # by id of the sequence
        self.states = States()

    def capacity(self, tokens: int) -> int:
        """Tokens of storage that a sequence of `tokens` tokens occupies."""
        return self._pool(tokens).capacity

    @property
    def allocated_tokens(self) -> int:
        """Tokens that fit the allocated storage."""
        return sum(pool.allocated * pool.capacity for pool in self.pools)

    def place(self, sequence: SequenceState) -> tuple[Pool, int]:
        """Pool and slot of a sequence that `place_all` has placed."""
        return self._places[id(sequence)]

    def place_all(self, sequences: Iterable[SequenceState]) -> None:
        """Gives each sequence a slot with room for all its known tokens.

        Sequences that outgrow the same pool move in one copy.
        """
        movers: list[SequenceState] = []
        new: list[SequenceState] = []
        for sequence in {id(sequence): sequence for sequence in sequences}.values():
            place = self._places.get(id(sequence))
            if place is None:
                new.append(sequence)
            elif sequence.total > place[0].capacity:
                movers.append(sequence)
        if not (movers or new):
            return
        arriving = Counter(self._pool(sequence.total) for sequence in (*movers, *new))
        if not self._room(arriving):
            self._lay_out(self._shares(arriving, movers), movers)
            movers = []
        moves: dict[tuple[Pool, Pool], list[SequenceState]] = {}
        for sequence in movers:
            moves.setdefault((self._places[id(sequence)][0], self._pool(sequence.total)), []).append(sequence)
        for (source, target), members in moves.items():
            self._move(source, target, members)
        for sequence in new:
            pool = self._pool(sequence.total)
            self._places[id(sequence)] = pool, pool.take(sequence)

    def _room(self, arriving: Counter[Pool]) -> bool:
        """Whether every sequence can take a slot before any gives up its own; grows pools where necessary."""
        grown: dict[Pool, int] = {}
        for pool, count in arriving.items():
            if pool.held + count > pool.allocated:
                first = max(1, min(FEWEST_SLOTS, FEWEST_TOKENS // pool.capacity))
                grown[pool] = max(first, 1 << (pool.held + count - 1).bit_length())
        more = sum((slots - pool.allocated) * pool.capacity for pool, slots in grown.items())
        if self.allocated_tokens + more > self._budget:
            unused = {pool: 0 for pool in self.pools if pool.allocated and not pool.held and not arriving[pool]}
            more -= sum(pool.allocated * pool.capacity for pool in unused)
            if self.allocated_tokens + more > self._budget:
                return False
            grown = {**unused, **grown}
        self._lay_out(grown)
        return True

    def _shares(self, arriving: Counter[Pool], movers: Sequence[SequenceState]) -> dict[Pool, int]:
        """Slots of all pools: the number each needs, plus half of the spare budget in proportion to need."""
        leaving = Counter(self._places[id(sequence)][0] for sequence in movers)
        needed = {pool: pool.held - leaving[pool] + arriving[pool] for pool in self.pools}
        needed_tokens = sum(slots * pool.capacity for pool, slots in needed.items())
        assert needed_tokens <= self._budget, "more runs than there is room for"
        spare = (self._budget - needed_tokens) // 2
        return {pool: slots + slots * spare // needed_tokens for pool, slots in needed.items()}

    def _lay_out(self, slots: Mapping[Pool, int], movers: Sequence[SequenceState] = ()) -> None:
        """Gives pools new storage of `slots` slots, and places their sequences there without holes.

        `movers` change to the pool that they need; `slots` must then name all pools. The old storage of a layer is
        freed before the next layer is copied.
        """
        moving = {id(sequence) for sequence in movers}
        members = {pool: [s for s in pool.slots if s is not None and id(s) not in moving] for pool in slots}
        for sequence in movers:
            members[self._pool(sequence.total)].append(sequence)
        copies: dict[tuple[Pool, Pool], list[tuple[int, int, int]]] = {}
        for pool, sequences in members.items():
            for slot, sequence in enumerate(sequences):
                source, source_slot = self._places[id(sequence)]
                length = min(sequence.kv_len, source.capacity)
                copies.setdefault((source, pool), []).append((source_slot, slot, length))
                self._places[id(sequence)] = pool, slot
        for pool, count in slots.items():
            pool.lay_out(count, members[pool])
        for layer in {layer for pool in slots for layer in pool.layers}:
            before = {pool: pool.layers.get(layer) for pool in slots}
            for pool in slots:
                pool.layers.pop(layer, None)
            for (source, target), rows in copies.items():
                stored, length = before[source], max(length for _, _, length in rows)
                if stored is not None and length:
                    target.copy_layer(layer, stored, [row[0] for row in rows], [row[1] for row in rows], length)

    def _move(self, source: Pool, target: Pool, movers: Sequence[SequenceState]) -> None:
        slots = [self._places[id(sequence)][1] for sequence in movers]
        for sequence in movers:
            self._places[id(sequence)] = target, target.take(sequence)
        target_slots = [self._places[id(sequence)][1] for sequence in movers]
        source.copy(slots, target, target_slots, max(sequence.kv_len for sequence in movers))
        for sequence, slot in zip(movers, slots, strict=True):
            source.release(slot, min(sequence.total, source.capacity))

    def release(self, sequence: SequenceState) -> None:
        """Frees a sequence's slot, if it has one."""
        self.states.forget(sequence)
        place = self._places.pop(id(sequence), None)
        if place is not None:
            place[0].release(place[1], sequence.total)

    def clear(self, sequence: SequenceState) -> None:
        """Zeroes the KV of a sequence that computes it again, if it has a slot."""
        self.states.forget(sequence)
        if (place := self._places.get(id(sequence))) is not None:
            place[0].clear(place[1], sequence.total)

    def copy_prefixes(self, copies: Iterable[tuple[SequenceState, SequenceState, int]]) -> None:
        """Copies the KV of the first `length` tokens, for each (source, target, length), and the states.

        All sequences must be placed. A source with states has exactly `length` tokens.
        """
        together: dict[tuple[Pool, Pool, int], tuple[list[int], list[int]]] = {}
        for source, target, length in copies:
            self.states.restore(self.states.exported(source), target)
            target_pool, target_slot = self._places[id(target)]
            source_pool, source_slot = self._places[id(source)]
            sources, targets = together.setdefault((source_pool, target_pool, length), ([], []))
            sources.append(source_slot)
            targets.append(target_slot)
        for (source_pool, target_pool, length), (sources, targets) in together.items():
            source_pool.copy(sources, target_pool, targets, length)

    def exported(self, sequence: SequenceState, length: int) -> Stored | None:
        """Copy of the KV of a sequence's first `length` tokens, and of its states; None when it has no slot."""
        if (place := self._places.get(id(sequence))) is None:
            return None
        pool, slot = place
        layers = {
            layer: (k[slot, :, :length].clone(), v[slot, :, :length].clone()) for layer, (k, v) in pool.layers.items()
        }
        return Stored(length, layers, self.states.exported(sequence))

    def restore(self, stored: Stored, sequence: SequenceState, length: int) -> None:
        """Writes the first `length` tokens of an exported copy into the slot of a placed sequence."""
        pool, slot = self.place(sequence)
        for layer, (k_KLD, v_KLD) in stored.layers.items():
            k, v = pool.layer(layer, k_KLD.transpose(0, 1), v_KLD.transpose(0, 1))
            k[slot, :, :length] = k_KLD[:, :length]
            v[slot, :, :length] = v_KLD[:, :length]
        self.states.restore(stored.states, sequence)

    def close_holes(self) -> None:
        """Moves the used slots of each pool to its front."""
        for pool in self.pools:
            while (moved := pool.close_hole()) is not None:
                self._places[id(moved[0])] = pool, moved[1]

    def _pool(self, tokens: int) -> Pool:
        return next(pool for pool in self.pools if tokens <= pool.capacity)
