"""Router replay: the experts that sampled a token are those that train it, from the engine to the gradient."""

import asyncio
import struct
from pathlib import Path
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_models import saved
from engine_server import threaded, waiting
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.errors import ConfigError
from shoal.model import UNKNOWN
from shoal.model.loading import load_model
from shoal.model.packed import packed_outputs
from shoal.model.routing import Routing, routing_of
from shoal.trainer.advantage import rows
from shoal.trainer.packing import micro_batch
from shoal.trainer.trainer import Trainer
from shoal.types import Completion, Reward, Rollout, Sample, Sampling, Turn
from until import until

EXPERTS = {"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24}
PROMPTS = [tuple(range(5 + i, 17 + i)) for i in range(8)]
LENGTH = 48
SHARES = {16: 0.75, 300: 0.85}
"""Share of the mismatch that is left, by the number of experts: of many, neighbours are much alike."""


@pytest.fixture(scope="module", params=SHARES)
def experts(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def each(experts: int) -> int:
    """Bytes of a token: two layers, two experts each, one or two bytes for each of these."""
    return 4 if experts < 256 else 8


@pytest.fixture(scope="module")
def mixture(experts: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    return saved("Qwen3Moe", folder, num_experts_per_tok=2, num_experts=experts, **EXPERTS)


@pytest.fixture(scope="module")
def sampled(mixture: Path) -> list[list[Completion]]:
    """Answers of an engine that computes in bfloat16, as the engine of a run does, two for each prompt."""
    with threaded(mixture, "--dtype=bfloat16", "--record-routing") as server:

        async def ask() -> list[list[Completion]]:
            async with server.engine() as engine:
                await engine.pause("keep")  # bfloat16 rounds by what shares a batch: all begin at once, in one order
                each = (
                    engine.generate(prompt, Sampling(LENGTH, seed=i), n=2, priority=-i)
                    for i, prompt in enumerate(PROMPTS)
                )
                asked = asyncio.gather(*each)
                await until(lambda: waiting(engine, 2 * len(PROMPTS)))
                await engine.resume()
                return await asked

        return asyncio.run(ask())


def test_replayed_experts_lessen_the_mismatch_of_engine_and_trainer(
    mixture: Path, sampled: list[list[Completion]], experts: int, each: int
) -> None:
    """In nats: a trainer in float32 against an engine in bfloat16."""
    replayed = Trainer(mixture, ModelConfig(device="cpu"), TrainConfig(router_replay=True))
    without, with_replay = [], []
    for prompt, answers in zip(PROMPTS, sampled, strict=True):
        turns = [(Turn(prompt, answer),) for answer in answers]
        samples = [row for i, one in enumerate(turns) for row in rows(Rollout(f"{i}", (), one, Reward(1.0)), 1.0)]
        batch = micro_batch(samples, [1.0] * len(samples), "cpu")
        assert batch.routing_TB is not None
        assert batch.routing_TB.shape == (sum(batch.lengths), each)
        for given_TB, found in ((None, without), (batch.routing_TB, with_replay)):
            with torch.no_grad():
                outputs = packed_outputs(
                    replayed.model, batch.tokens_T, batch.lengths, at=batch.at_N, routing_TB=given_TB
                )
            found.extend((outputs.logp_N - batch.behav_N).abs().tolist())
    print(f"mismatch in nats: {fmean(without):.4f} without, {fmean(with_replay):.4f} with; largest {max(without):.2f}, "
          f"{max(with_replay):.2f}")  # fmt: skip
    assert fmean(with_replay) < SHARES[experts] * fmean(without)
    assert max(with_replay) < 0.75 * max(without)


def test_the_engine_records_every_token_but_the_last(sampled: list[list[Completion]], experts: int, each: int) -> None:
    for prompt, answers in zip(PROMPTS, sampled, strict=True):
        for answer in answers:
            assert len(answer.routing) == each * (len(prompt) + len(answer.token_ids) - 1)
            numbers = struct.unpack(f"<{len(answer.routing) * 4 // each}{'BH'[each == 8]}", answer.routing)
            assert experts > max(numbers) > 0.9 * experts
        first, second = (answer.routing[: each * len(prompt)] for answer in answers)
        assert first == second, "the prompt is computed once"


def test_given_experts_are_used_and_unknown_ones_are_the_models_own(mixture: Path, experts: int, each: int) -> None:
    model = load_model(mixture)
    routing, tokens_T = Routing(model), torch.arange(3, 13)
    assert routing_of(model) is routing

    def logp(given_TB: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            return packed_outputs(model, tokens_T, [10], at=torch.arange(1, 10), routing_TB=given_TB).logp_N

    own = logp(None)
    known = torch.cat([routing.found(), torch.full((1, each), UNKNOWN, dtype=torch.uint8)])
    torch.testing.assert_close(logp(known), own, rtol=0, atol=0)
    torch.testing.assert_close(logp(torch.full_like(known, UNKNOWN)), own, rtol=0, atol=0)
    other = ((routing.read(known[:9]) + 1) % experts).to(routing.dtype).view(torch.uint8)
    assert (logp(torch.cat([other, known[9:]])) - own).abs().max() > 0.01
    assert routing.found().equal(other)


@settings(max_examples=20)
@given(experts=st.sampled_from([2, 16, 254, 255, 256, 257, 300]), k=st.integers(1, 2), seed=st.integers(0, 99))
def test_a_mixture_of_any_number_of_experts_replays_its_own_choice_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, experts: int, k: int, seed: int
) -> None:
    """From the bytes of an answer to the gradient's rows, where some tokens have no record."""
    few = {"num_experts": experts, "num_experts_per_tok": k, "moe_intermediate_size": 4, "num_hidden_layers": 1}
    model = load_model(saved("Qwen3Moe", tmp_path_factory.mktemp("many"), seed, **{**EXPERTS, **few}))
    routing, tokens = Routing(model), tuple(range(3, 43))
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[-1] = 10 * model.model.embed_tokens.weight[3]  # the last one is chosen
        own = packed_outputs(model, torch.tensor(tokens), [40], at=torch.arange(1, 40)).logp_N
    found = routing.found()
    assert routing.read(found).max() == experts - 1
    each = found.shape[1]
    recorded = bytes([UNKNOWN]) * each + found[1:].numpy().tobytes()
    mask = (0, *(1,) * 39)
    sample = Sample(tokens, mask, (0.0,) * 40, (0,) * 40, mask, recorded)
    batch = micro_batch([sample], [1.0], "cpu")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(-1)  # every choice of its own would be another
        changed = packed_outputs(model, batch.tokens_T, batch.lengths, at=batch.at_N, routing_TB=batch.routing_TB)
        assert routing.found()[1:].equal(found[1:])
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(-1)
        again = packed_outputs(model, batch.tokens_T, batch.lengths, at=batch.at_N, routing_TB=batch.routing_TB)
    assert again.logp_N.equal(own)
    assert experts <= k or not changed.logp_N.equal(own)


def test_checkpointed_layers_train_the_replayed_experts_too(mixture: Path, sampled: list[list[Completion]]) -> None:
    group = [
        row for answer in sampled[0] for row in rows(Rollout("r", (), (Turn(PROMPTS[0], answer),), Reward(1.0)), 1)
    ]
    norms = [
        Trainer(mixture, ModelConfig(device="cpu", gradient_checkpointing=on), TrainConfig(router_replay=True))
        .step([group])
        .grad_norm
        for on in (False, True)
    ]
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_replay_of_a_dense_model_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.router_replay: expected a mixture of experts"):
        Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig(router_replay=True))
