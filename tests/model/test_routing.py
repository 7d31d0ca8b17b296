"""Router replay: the experts that sampled a token are those that train it, from the engine to the gradient."""

import asyncio
from pathlib import Path
from statistics import fmean

import pytest
import torch

from engine_models import saved
from engine_server import serving
from shoal.config import ModelConfig, parse
from shoal.config.training import TrainConfig
from shoal.errors import ConfigError
from shoal.model import UNKNOWN
from shoal.model.loading import load_model
from shoal.model.packed import packed_outputs
from shoal.model.routing import Routing, routing_of
from shoal.trainer.advantage import rows
from shoal.trainer.packing import micro_batch
from shoal.trainer.trainer import Trainer
from shoal.types import Completion, Reward, Rollout, Sampling, Turn

EXPERTS = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 16, "moe_intermediate_size": 24}
PROMPTS = [tuple(range(5 + i, 17 + i)) for i in range(8)]
LENGTH = 48


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("Qwen3Moe", tmp_path_factory.mktemp("mixture"), num_experts_per_tok=2, **EXPERTS)


@pytest.fixture(scope="module")
def sampled(mixture: Path) -> list[list[Completion]]:
    """Answers of an engine that computes in bfloat16, as the engine of a run does, two for each prompt."""
    with serving(mixture, "--dtype=bfloat16", "--record-routing") as server:

        async def ask() -> list[list[Completion]]:
            async with server.engine() as engine:
                each = (engine.generate(prompt, Sampling(LENGTH, seed=i), n=2) for i, prompt in enumerate(PROMPTS))
                return await asyncio.gather(*each)

        return asyncio.run(ask())


def test_replayed_experts_halve_the_mismatch_of_engine_and_trainer(
    mixture: Path, sampled: list[list[Completion]]
) -> None:
    """In nats: a trainer in float32 against an engine in bfloat16."""
    replayed = Trainer(mixture, ModelConfig(device="cpu"), TrainConfig(router_replay=True))
    without, with_replay = [], []
    for prompt, answers in zip(PROMPTS, sampled, strict=True):
        turns = [(Turn(prompt, answer),) for answer in answers]
        samples = [row for i, each in enumerate(turns) for row in rows(Rollout(f"{i}", (), each, Reward(1.0)), 1.0)]
        batch = micro_batch(samples, [1.0] * len(samples), "cpu")
        assert batch.routing_TE is not None
        assert batch.routing_TE.shape == (sum(batch.lengths), 4)  # two layers of two experts each
        for given_TE, found in ((None, without), (batch.routing_TE, with_replay)):
            with torch.no_grad():
                outputs = packed_outputs(
                    replayed.model, batch.tokens_T, batch.lengths, at=batch.at_N, routing_TE=given_TE
                )
            found.extend((outputs.logp_N - batch.behav_N).abs().tolist())
    print(f"mismatch in nats: {fmean(without):.4f} without, {fmean(with_replay):.4f} with; largest {max(without):.2f}, "
          f"{max(with_replay):.2f}")  # fmt: skip
    assert fmean(with_replay) < 0.7 * fmean(without)
    assert max(with_replay) < 0.5 * max(without)


def test_the_engine_records_every_token_but_the_last(sampled: list[list[Completion]]) -> None:
    for prompt, answers in zip(PROMPTS, sampled, strict=True):
        for answer in answers:
            assert len(answer.routing) == 4 * (len(prompt) + len(answer.token_ids) - 1)
            assert max(answer.routing) < 16
        first, second = (answer.routing[: 4 * len(prompt)] for answer in answers)
        assert first == second, "the prompt is computed once"


def test_given_experts_are_used_and_unknown_ones_are_the_models_own(mixture: Path) -> None:
    model = load_model(mixture)
    routing, tokens_T = Routing(model), torch.arange(3, 13)
    assert routing_of(model) is routing

    def logp(given_TE: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            return packed_outputs(model, tokens_T, [10], at=torch.arange(1, 10), routing_TE=given_TE).logp_N

    own = logp(None)
    experts = torch.cat([routing.found(), torch.full((1, 4), UNKNOWN, dtype=torch.uint8)])
    torch.testing.assert_close(logp(experts), own, rtol=0, atol=0)
    torch.testing.assert_close(logp(torch.full_like(experts, UNKNOWN)), own, rtol=0, atol=0)
    other = (experts[:9].int() + 1) % 16
    assert (logp(torch.cat([other.to(torch.uint8), experts[9:]])) - own).abs().max() > 0.01
    torch.testing.assert_close(routing.found(), other.to(torch.uint8))


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


def test_replay_of_a_dense_model_or_from_other_servers_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.router_replay: expected a mixture of experts"):
        Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig(router_replay=True))
    with pytest.raises(ConfigError, match=r"train\.router_replay: expected false with engine\.urls"):
        parse({"tasks": [{"name": "gcd"}], "train": {"router_replay": True}, "engine": {"urls": ["http://x:1"]}})
