"""A trained session under a JSON Schema: the real engine samples, and one training step takes what it logged."""

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from test_trainer import gradient
from torch import Tensor

from chat_templates import STYLES, renderer, tokenizer
from engine_models import plain, saved
from reference.losses import decoupled
from shoal.config import ModelConfig
from shoal.config.training import DecoupledLoss, TrainConfig
from shoal.engine.compute.logit_rules import LEAST_SHARE, Grammars
from shoal.engine.compute.options import EngineLimits
from shoal.engine.compute.step_engine import StepEngine
from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.server.http_client import HttpEngine
from shoal.engine.server.routes import EngineServer
from shoal.gateway.grammars import answer_grammar
from shoal.gateway.host import Host
from shoal.model.loading import load_model
from shoal.net.server import serving
from shoal.trainer.advantage import rows
from shoal.trainer.trainer import Trainer
from shoal.types import Completion, Reward, Rollout, Sampling, Turn

LONGEST = 1000
TEMPERATURE = 1.3
# A model that nobody trained has most of its probability elsewhere: only the text within `said` is not forced.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"said": {"type": "string", "minLength": 6, "maxLength": 12}, "ok": {"enum": ["yes", "no"]}},
    "required": ["said", "ok"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, made = tmp_path_factory.mktemp("schema"), tokenizer(STYLES["qwen2.5"])
    made.save_pretrained(path)
    return saved("Qwen2", path, vocabulary=len(made), num_key_value_heads=2, max_position_embeddings=LONGEST)


async def sampled(model: Path, seed: int) -> tuple[Turn, ...]:
    """Turns of a session whose client asks twice for an answer under the schema, over HTTP as in a run."""
    engine = StepEngine(load_model(model), EngineLimits(LONGEST, max_running=4))
    server = EngineServer(engine, crashed=lambda error: None, model_dir=model)
    made, pool = renderer("qwen2.5"), EnginePool()
    async with serving(server.app, grace_s=1) as url:
        await pool.join("engine", HttpEngine(url))
        async with Host.open(pool, made, max_model_len=LONGEST) as host:
            session = host.session(Sampling(500, temperature=TEMPERATURE, seed=seed), 0, 60.0)
            messages: list[Any] = [{"role": "user", "content": "Which one?"}]
            for _ in range(2):
                answer = await session.openai().chat.completions.create(
                    model="-", messages=messages, response_format=FORMAT
                )
                said = answer.choices[0].message.content or ""
                jsonschema.validate(json.loads(said), SCHEMA)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
            await session.end()
        await pool.aclose()
    return session.tree.turns()


def logprobs(network: Any, tokens: Sequence[int]) -> Tensor:
    """Logprobs [L - 1, V] of what follows each token but the last, at the sampling temperature."""
    logits_LV = network(torch.tensor([tokens])).logits[0, :-1]
    return torch.log_softmax(logits_LV / TEMPERATURE, -1)


def shares(model: Path, completion: Completion, logp_LV: Tensor) -> list[float]:
    """Share of the model's probability that the schema leaves for each sampled token."""
    made = renderer("qwen2.5")
    grammar = answer_grammar(made, json.dumps(SCHEMA), (), "", "", one_call=False)
    vocabulary, found = logp_LV.shape[1], []
    matcher = Grammars(model, vocabulary).matcher(grammar, made.stop_token_ids)
    for token, logp_V in zip(completion.token_ids, logp_LV, strict=True):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        found.append(sum(math.exp(float(logp_V[i])) for i in range(vocabulary) if bits >> i & 1))
        assert matcher.consume_token(token)
    return found


def test_a_trained_session_under_a_schema_is_logged_and_trained_as_it_was_sampled(model: Path) -> None:
    """The gradient equals that of a loss in float64 over the tokens that the schema did not force."""
    network = plain(model).double()
    loss = DecoupledLoss()
    ours = Trainer(model, ModelConfig(device="cpu"), TrainConfig(lr=1e-3, loss=loss), TEMPERATURE)
    samples, expected, trained = [], torch.zeros((), dtype=torch.float64), 0
    for seed, advantage in ((1, 1.0), (2, -1.0), (3, 1.0)):
        turns = asyncio.run(sampled(model, seed))
        assert [turn.parent for turn in turns] == [None, 0]
        (row,) = rows(Rollout(f"r{seed}", (), turns, Reward(0.0)), advantage)
        samples.append(row)
        logp_LV, end = logprobs(network, row.tokens), 0
        for turn in turns:
            start = end + len(turn.rendered_ids)
            end = start + len(turn.completion.token_ids)
            own_LV, completion = logp_LV[start - 1 : end - 1], turn.completion
            share_L = shares(model, completion, own_LV.detach())
            logp_L = [own_V[token] for own_V, token in zip(own_LV, completion.token_ids, strict=True)]
            assert completion.forced == tuple(i for i, share in enumerate(share_L) if share < LEAST_SHARE)
            assert 0 < len(completion.forced) < len(share_L)
            prox = [logp.item() for logp in logp_L]
            masked = [logp - math.log(share) for logp, share in zip(prox, share_L, strict=True)]
            assert completion.logprobs == pytest.approx(masked, abs=1e-4)
            assert row.mask[start:end] == tuple(int(share >= LEAST_SHARE) for share in share_L)
            expected = expected + decoupled(
                logp_L, prox, masked, [advantage] * len(masked), row.mask[start:end],
                *(loss.clip_low, loss.clip_high, loss.weight_cap, loss.over_cap, math.inf),
            )  # fmt: skip
            trained += sum(row.mask[start:end])
    (expected / trained).backward()
    got, _ = gradient(ours, samples)
    for (name, parameter), found in zip(network.named_parameters(), got, strict=True):
        torch.testing.assert_close(found.double(), parameter.grad, rtol=1e-3, atol=1e-5, msg=name)
    before = [sum(scored) for scored in ours.logprobs([row.tokens for row in samples], TEMPERATURE)]
    assert ours.step([samples]).tokens == trained
    after = [sum(scored) for scored in ours.logprobs([row.tokens for row in samples], TEMPERATURE)]
    assert [b < a for b, a in zip(before, after, strict=True)] == [True, False, True]
