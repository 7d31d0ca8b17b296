"""Decode steps that are captured once and replayed, against steps that are computed anew."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cpu_graphs import CpuCapture
from engine_models import saved
from shoal.engine.graphs import Capture
from shoal.engine.limits import Limits
from shoal.engine.local import LocalEngine
from shoal.engine.request import Draft, Request
from shoal.model import load_model
from shoal.types import Sampling

KINDS: dict[str, dict[str, object]] = {
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 16},
    "Llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 20},
}


def served(path: Path, capture: Capture | None, max_running: int = 8) -> LocalEngine:
    return LocalEngine(load_model(path), Limits(160, max_running=max_running, chunk_tokens=24), capture=capture)


def answered(engine: LocalEngine, each_step: Callable[[int], None] = lambda step: None) -> list[Draft]:
    """Answers of many lengths, more than run at once, so that sequences come, grow out of their slots and go."""
    samplings = [
        Sampling(6 + 9 * (i * 5 % 11), temperature=(0.0, 1.0, 0.7)[i % 3], seed=i, top_k=(0, 9)[i % 2])
        for i in range(14)
    ]
    requests = [Request([5 + i] * (1 + 7 * i % 40), sampling, n=1 + i % 2) for i, sampling in enumerate(samplings)]
    for request in requests:
        engine.submit(request)
    step = 0
    while not engine.idle:
        each_step(step)
        engine.step()
        step += 1
    return [draft for request in requests for draft in request.drafts]


def assert_equal(found: list[Draft], expected: list[Draft]) -> None:
    assert [draft.drawn for draft in found] == [draft.drawn for draft in expected]
    logprobs = [logprob for draft in expected for logprob in draft.logprobs]
    assert [logprob for draft in found for logprob in draft.logprobs] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_steps_draw_what_computed_ones_draw(kind: str, tmp_path: Path) -> None:
    path = saved(kind, tmp_path, **KINDS[kind])
    capture = CpuCapture()
    replaying = served(path, capture)
    computing = served(path, None)
    for _ in range(2):  # pools have grown when it begins anew
        assert_equal(answered(replaying), answered(computing))
    assert replaying.counts().graph_steps > 3 * capture.count > 0


def test_graphs_serve_new_weights(tmp_path: Path) -> None:
    path, other = (saved("Qwen2", tmp_path / str(seed), seed, **KINDS["Qwen2"]) for seed in range(2))
    drafts = []
    for capture in (CpuCapture(), None):
        engine = served(path, capture)

        def pushed(step: int, engine: LocalEngine = engine) -> None:
            if step % 9 == 8 and engine.version < 6:
                weights = (path, other)[(engine.version + 1) % 2]
                engine.update(engine.slots.staged(engine.version + 1, weights, None))

        drafts.append(answered(engine, pushed))
        assert engine.version == 6
    assert_equal(*drafts)


def test_a_few_graphs_serve_every_batch(tmp_path: Path) -> None:
    capture = CpuCapture()
    engine = served(saved("Qwen2", tmp_path, **KINDS["Qwen2"]), capture)
    for _ in range(2):  # pools have grown when it begins anew
        answered(engine)
    captured = capture.count
    answered(engine)
    assert capture.count == captured


def test_graphs_that_had_to_go_are_captured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, all_kept, one_kept = saved("Qwen2", tmp_path, **KINDS["Qwen2"]), CpuCapture(), CpuCapture()
    expected = answered(served(path, all_kept))
    monkeypatch.setattr("shoal.engine.graphs.MOST_GRAPHS", 1)
    assert_equal(answered(served(path, one_kept)), expected)
    assert one_kept.count > all_kept.count


def test_new_weights_are_not_spoiled_by_what_others_left(tmp_path: Path) -> None:
    """Weights whose forward overflows leave infinities in every slot."""
    path = saved("Qwen2", tmp_path, **KINDS["Qwen2"])
    engine = served(path, CpuCapture())
    answered(engine)
    with torch.inference_mode():
        for pool in engine._cache.pools:
            for k, v in pool._layers.values():
                k.fill_(torch.inf)
                v.fill_(torch.nan)
    engine.update(engine.slots.staged(1, path, None))
    assert_equal(answered(engine), answered(served(path, None)))


def test_an_engine_goes_on_when_steps_cannot_be_captured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refusing(step: Callable[[], None]) -> Callable[[], None]:
        step()
        raise RuntimeError("operation not permitted when stream is capturing")

    path = saved("Qwen2", tmp_path, **KINDS["Qwen2"])
    engine = served(path, refusing)
    with caplog.at_level(logging.WARNING):
        assert_equal(answered(engine), answered(served(path, None)))
    assert engine.counts().graph_steps == 0
    assert [record.getMessage() for record in caplog.records] == [
        "decode steps cannot be captured, and are launched one kernel at a time: "
        "operation not permitted when stream is capturing"
    ]


def test_steps_of_more_rows_than_there_is_room_for_are_computed(tmp_path: Path) -> None:
    """Few sequences in each of many pools, whose slots are rounded up."""
    path = saved("Qwen2", tmp_path, **KINDS["Qwen2"])
    engine = served(path, CpuCapture(), max_running=1)
    engine._graphs._token_M = engine._graphs._token_M[:0]  # type: ignore[union-attr]
    assert_equal(answered(engine), answered(served(path, None, max_running=1)))
    assert engine.counts().graph_steps == 0


def test_a_step_that_needs_the_host_cannot_be_captured() -> None:
    """Of `CpuCapture`, which every claim above rests on."""
    total, added = torch.zeros(1), 1.0

    def counted() -> None:
        total.add_(added)

    replay = CpuCapture()(counted)
    added = 5.0
    replay()
    assert float(total) == 3.0, "replayed with the number that was captured"
    with pytest.raises(RuntimeError, match="cannot be captured"):
        CpuCapture()(lambda: total.mul_(float(total)) and None)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        CpuCapture()(lambda: total.add_(torch.tensor([added])) and None)
