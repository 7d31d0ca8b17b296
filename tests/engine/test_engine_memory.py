"""What KV storage is allocated, against what may be."""

import random
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_models import saved
from shoal.engine.compute.kv_cache import KVCache
from shoal.engine.compute.options import EngineLimits
from shoal.engine.compute.request import Request
from shoal.engine.compute.scheduler import Scheduler, SequenceState, StepPlan
from shoal.engine.compute.step_engine import StepEngine
from shoal.model.loading import load_model
from shoal.types import Sampling

LONGEST = 200
LAYERS, HEADS, WIDTH = 3, 1, 2
TOKEN_BYTES = LAYERS * 2 * HEADS * WIDTH * 4
"""Of K and V in float32."""


def kv_of(sequence: SequenceState, start: int, end: int) -> Tensor:
    """[T, K, D] that no other token of any sequence with another prompt has."""
    at_T11 = torch.arange(start, end, dtype=torch.float32)[:, None, None]
    return (1000.0 * (sequence.request_id + 1) + at_T11).expand(-1, HEADS, WIDTH)


def written(cache: KVCache, sequence: SequenceState, start: int, end: int) -> None:
    pool, slot = cache.place(sequence)
    x_TKD = kv_of(sequence, start, end)
    for layer in range(LAYERS):
        k, v = pool.layer(layer, x_TKD, x_TKD)
        k[slot, :, start:end] = x_TKD.transpose(0, 1) + layer
        v[slot, :, start:end] = -x_TKD.transpose(0, 1) - layer


def assert_stored(cache: KVCache, sequence: SequenceState, end: int) -> None:
    pool, slot = cache.place(sequence)
    expected = kv_of(sequence, 0, end).transpose(0, 1)
    for layer, (k, v) in pool.layers.items():
        torch.testing.assert_close(k[slot, :, :end], expected + layer)
        torch.testing.assert_close(v[slot, :, :end], -expected - layer)


def computed(cache: KVCache, plan: StepPlan[SequenceState]) -> list[SequenceState]:
    """Does with KV what an engine does, checking what is stored; the sequences that get a token."""
    for sequence in plan.preempted:
        cache.release(sequence)
    cache.place_all(plan.sequences)
    cache.copy_prefixes((copy.source, copy.target, copy.length) for copy in plan.copies)
    cache.close_holes()
    for sequence in plan.decode:
        assert_stored(cache, sequence, sequence.total - 1)
        written(cache, sequence, sequence.total - 1, sequence.total)
    drawing = list(plan.decode)
    for chunk in plan.chunks:
        assert_stored(cache, chunk.sequence, chunk.start)
        written(cache, chunk.sequence, chunk.start, chunk.start + chunk.length)
        if chunk.completes:
            drawing += [chunk.sequence, *chunk.followers]
            cache.copy_prefixes((chunk.sequence, f, f.prompt_len) for f in chunk.followers)
    return drawing


class Memory:
    """Bytes of storage that live, and the most that ever did."""

    def __init__(self) -> None:
        self.live_bytes = self.most_bytes = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Like `zeros_on_demand`."""
        array = np.zeros(tuple(shape), dtype=np.float32)
        self.live_bytes += array.nbytes
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        weakref.finalize(array, self._gone, array.nbytes)
        return torch.from_numpy(array)

    def _gone(self, size_bytes: int) -> None:
        self.live_bytes -= size_bytes


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), spare_tokens=st.integers(0, 3 * LONGEST), max_running=st.integers(1, 24))
def test_storage_never_exceeds_its_budget_by_more_than_one_layer(
    seed: int, spare_tokens: int, max_running: int
) -> None:
    generator, budget, memory = random.Random(seed), LONGEST + spare_tokens, Memory()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shoal.engine.compute.kv_cache.zeros_on_demand", memory.zeros)
        cache = KVCache(LONGEST, budget)
        scheduler: Scheduler[SequenceState] = Scheduler(
            max_running=max_running,
            kv_budget_tokens=budget,
            chunk_tokens=48,
            max_model_len=LONGEST,
            capacity=cache.capacity,
        )
        ends: dict[SequenceState, int] = {}
        for request_id in range(20):
            prompt, drawn = 1 + int(generator.expovariate(1 / 30)) % 120, 1 + int(generator.lognormvariate(2.5, 1.2))
            for _ in range(generator.choice((1, 1, 3))):
                sequence = SequenceState(request_id, prompt)
                ends[sequence] = min(prompt + drawn, LONGEST)
                scheduler.add(sequence)
        steps = 0
        while scheduler.running or scheduler.waiting:
            steps += 1
            assert steps < 20_000, "something starves"
            if generator.random() < 0.02:
                scheduler.forget(scheduler.running)
            for sequence in computed(cache, scheduler.plan()):
                sequence.sampled.append(0)
                if sequence.total >= ends[sequence]:
                    scheduler.remove(sequence)
                    cache.release(sequence)
            assert memory.live_bytes <= cache.allocated_tokens * TOKEN_BYTES <= budget * TOKEN_BYTES
        assert memory.most_bytes <= budget * TOKEN_BYTES * (1 + 1 / LAYERS)


def answered(path: Path, limits: EngineLimits) -> tuple[StepEngine, list[list[int]]]:
    engine = StepEngine(load_model(path), limits)
    requests = [Request([5 + i] * (1 + 5 * i), Sampling(20 + 9 * i, seed=i)) for i in range(16)]
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
    return engine, [request.drafts[0].sampled for request in requests]


def test_an_exhausted_budget_preempts_instead_of_growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, budget, layers = saved("Qwen2", tmp_path, num_key_value_heads=2), 2 * LONGEST, 2
    token_bytes = layers * 2 * 2 * 8 * 4  # K and V, heads, width, float32
    roomy, expected = answered(path, EngineLimits(LONGEST, max_running=16))
    assert roomy.preemptions == 0
    memory = Memory()
    monkeypatch.setattr("shoal.engine.compute.kv_cache.zeros_on_demand", memory.zeros)
    limits = EngineLimits(LONGEST, max_running=16, kv_tokens=budget, prefix_cache_bytes=0)
    scarce, found = answered(path, limits)
    assert found == expected
    assert scarce.preemptions > 0
    assert 0.5 < memory.most_bytes / (budget * token_bytes) <= 1 + 1 / layers


def test_a_long_sequence_alone_has_storage_for_no_more_than_itself() -> None:
    cache = KVCache(1 << 17, 1 << 24)
    sequence = SequenceState(0, (1 << 17) - 100)
    cache.place_all([sequence])
    assert cache.allocated_tokens == 1 << 17
