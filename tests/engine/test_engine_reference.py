"""The engine against a slow one that decodes one sequence at a time, under any order of events."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from engine_models import plain, saved
from shoal.engine.compute.batch import SamplingRows, sample
from shoal.engine.compute.options import EngineLimits, OnUpdate, PauseMode
from shoal.engine.compute.request import Draft, Request, Uniforms
from shoal.engine.compute.step_engine import StepEngine
from shoal.errors import EngineUnavailable
from shoal.model.loading import load_model
from shoal.types import FinishReason, Sampling

VOCABULARY = 61
LONGEST = 96
STOP = 3


@dataclass(frozen=True)
class Weights:
    path: Path
    model: PreTrainedModel
    """With transformers' own attention."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """Three models of one shape."""
    found = []
    for seed in range(3):
        path = tmp_path_factory.mktemp(f"weights{seed}")
        saved("Qwen2", path, seed, VOCABULARY, num_key_value_heads=2, max_position_embeddings=128)
        found.append(Weights(path, plain(path)))
    return found


@torch.inference_mode()
def redrawn(draft: Draft, versions: list[int], served: dict[int, PreTrainedModel]) -> None:
    """Draws each token of a completion again, alone, after those before it, with the weights said to have drawn it."""
    uniforms = Uniforms(draft.sampling.seed or 0, draft.index)
    row_1L = torch.tensor([[*draft.prompt_ids, *draft.sampled]])
    for version in set(versions):
        drawn_by = [i for i, drawer in enumerate(versions) if drawer == version]
        logits_NV = served[version](row_1L).logits[0, [draft.prompt_len - 1 + i for i in drawn_by]]
        rows = SamplingRows([draft.sampling] * len(drawn_by))
        token_N, logp_N = sample(logits_NV, rows, torch.tensor([uniforms[i] for i in drawn_by]))
        assert [draft.sampled[i] for i in drawn_by] == token_N.tolist()
        assert [draft.logprobs[i] for i in drawn_by] == pytest.approx(logp_N.tolist(), abs=1e-4)


def stepped(engine: StepEngine) -> list[Request]:
    """The requests that a step ended; checks that an engine is idle just when a step does nothing."""

    def done() -> tuple[object, ...]:
        return engine.tokens_drawn, engine.tokens_prefilled, engine.version, engine.running

    idle, before = engine.idle, done()
    ended = engine.step()
    assert idle == (not ended and done() == before)
    return ended


def prompt(seed: int, length: int) -> list[int]:
    """Prompts of one seed begin alike, so that they find each other's KV."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (64,), generator=generator).tolist()[:length]


samplings = st.builds(
    Sampling,
    max_tokens=st.sampled_from([1, 4, 20, 60]),
    temperature=st.sampled_from([0.0, 0.8]),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([0, 0, 7]),
    stop_token_ids=st.sampled_from([(), (STOP,)]),
    seed=st.integers(0, 5),
)
requests = st.builds(
    Request,
    prompt_ids=st.builds(prompt, st.integers(0, 2), st.sampled_from([1, 9, 24, 30, 60])),
    sampling=samplings,
    n=st.sampled_from([1, 1, 3]),
    priority=st.integers(-1, 1),
)
events = st.lists(
    st.one_of(
        requests,
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.sampled_from(["abort", "update", "pause", "resume", "wait", "abort all"]), st.integers(0, 9)),
    ),
    min_size=3,
    max_size=20,
)


@settings(max_examples=40)
@example(  # an update waits for a request that stands still, through a pause of several steps
    happening=[
        Request([5, 6, 7], Sampling(20, seed=1)),
        ("steps", 3),
        ("pause", 2),
        ("update", 1),
        ("steps", 4),
        Request([5, 6], Sampling(4, seed=1)),
        ("steps", 2),
        ("resume", 0),
    ],
    max_running=2,
    chunk_tokens=16,
    kv_tokens=None,
    prefix_cache_bytes=0,
    on_update=OnUpdate.DRAIN,
)
@given(
    happening=events,
    max_running=st.integers(1, 5),
    chunk_tokens=st.sampled_from([5, 16, 64]),
    kv_tokens=st.sampled_from([None, LONGEST, LONGEST + 64]),
    prefix_cache_bytes=st.sampled_from([0, 30_000, 10**7]),
    on_update=st.sampled_from([OnUpdate.RECOMPUTE, OnUpdate.DRAIN]),
)
def test_any_order_of_events_draws_what_one_sequence_at_a_time_draws(
    happening: list[Request | tuple[str, int]],
    max_running: int,
    chunk_tokens: int,
    kv_tokens: int | None,
    prefix_cache_bytes: int,
    on_update: OnUpdate,
    weights: list[Weights],
) -> None:
    limits = EngineLimits(
        LONGEST,
        max_running=max_running,
        chunk_tokens=chunk_tokens,
        kv_tokens=kv_tokens,
        prefix_cache_bytes=prefix_cache_bytes,
    )
    engine = StepEngine(load_model(weights[0].path), limits, on_update=on_update)
    served = {0: weights[0].model}
    asked: list[Request] = []
    ended: list[Request] = []
    for event in happening:
        match event:
            case Request():
                request = replace(event, drafts=[])
                try:
                    engine.submit(request)
                    asked.append(request)
                except EngineUnavailable:
                    assert engine.paused
            case "steps", count:
                for _ in range(count):
                    ended += stepped(engine)
            case "abort", which if asked:
                engine.abort([asked[which % len(asked)]])
            case "abort all", _:
                engine.abort()
            case "update", which:
                version = max(served) + 1
                served[version] = weights[which % 3].model
                engine.update(engine.slots.staged(version, weights[which % 3].path, None))
            case "pause", which:
                engine.pause(list(PauseMode)[which % 3])
                ended += stepped(engine)
                if which > 4:
                    engine.resume()
            case "resume", _:
                engine.resume()
            case "wait", _:
                engine.pause(PauseMode.WAIT)
            case _:
                pass
    engine.resume()
    steps = 0
    while not engine.idle:
        ended += stepped(engine)
        steps += 1
        assert steps < 5000, "something starves"
    assert {id(request) for request in ended} == {id(request) for request in asked}
    assert len(ended) == len(asked)
    assert engine.version == max(served)
    for request in asked:
        for draft in request.drafts:
            redrawn(draft, draft.versions, served)
            if draft.finish_reason is FinishReason.LENGTH:
                room = LONGEST - draft.prompt_len
                assert len(draft.sampled) == min(draft.sampling.max_tokens, room)
            if draft.finish_reason is not FinishReason.ABORT and draft.targets:
                assert len(draft.scores) == draft.prompt_len - 1
            assert (draft.finish_reason is FinishReason.STOP) == (
                draft.sampled[-1:] == [STOP] and STOP in draft.sampling.stop_token_ids
            )
