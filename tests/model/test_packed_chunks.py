"""The language-model head in chunks of tokens equals the whole, and its memory does not grow with the tokens."""

import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from engine_models import saved
from shoal.model import packed
from shoal.model.loading import load_model
from shoal.net.process import torch_environment
from shoal.trainer.loss import kl

ROWS = ((5, 6, 7, 8, 9, 3), (5, 6, 7, 20, 21), (5, 6, 7, 20, 22, 23, 24, 25), (9, 8))
KINDS: dict[str, dict[str, object]] = {
    "Qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Gemma3Text": {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 3.0},
    "Granite": {"num_key_value_heads": 2, "logits_scaling": 4.0},
    "Cohere": {"num_key_value_heads": 2, "logit_scale": 0.25},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_chunks_give_the_loss_and_the_gradient_of_the_whole(
    kind: str, entropy: Literal["value", "gradient"], tmp_path: Path
) -> None:
    """The loss has an entropy bonus and the distance to a reference, as the trainer's may."""
    model = load_model(saved(kind, tmp_path / "a", **KINDS[kind]))
    reference = load_model(saved(kind, tmp_path / "b", seed=1, **KINDS[kind]))
    tokens_T, lengths = torch.tensor([token for row in ROWS for token in row]), [len(row) for row in ROWS]
    at_N = torch.tensor([i for i in range(len(tokens_T)) if i not in accumulate(lengths, initial=0)])

    def found(most_logits: int) -> tuple[Tensor, ...]:
        with torch.no_grad():
            ref_N = packed.packed_outputs(reference, tokens_T, lengths, at=at_N, temperature=0.7).logp_N
        outputs = packed.packed_outputs(
            model, tokens_T, lengths, at=at_N, temperature=0.7, entropy=entropy, most_logits=most_logits
        )
        logp_N, entropy_N = outputs.logp_N, outputs.entropy_N
        assert entropy_N is not None
        loss = (logp_N + 0.1 * kl(logp_N, ref_N, "k2") - 0.1 * entropy_N).mean()
        model.zero_grad()
        loss.backward()
        return logp_N.detach(), entropy_N.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)

    whole = found(packed.MOST_LOGITS)
    for tokens in (1, 3):
        for got, wanted in zip(found(tokens * 97), whole, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


STEP = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from transformers import Qwen2Config, Qwen2ForCausalLM
from shoal.model import packed
from shoal.model.loading import ATTENTION
from shoal.model.mixers import Forwards
model = Qwen2ForCausalLM._from_config(
    Qwen2Config(vocab_size=150_000, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2), attn_implementation=ATTENTION)
Forwards(model)
for rows in map(int, sys.argv[1:]):
    tokens_T = torch.randint(0, 150_000, (rows * 128,))
    at_N = torch.arange(rows * 128)[torch.arange(rows * 128) % 128 > 0]
    packed.packed_outputs(model, tokens_T, [128] * rows, at=at_N, entropy="value").logp_N.sum().backward()
    print(int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024)
"""


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    """3 times the tokens, in the environment of the trainer: their logits alone would take 1,500 MB more."""
    command = [sys.executable, "-c", STEP, "8", "24"]
    done = subprocess.run(command, env=torch_environment(1), capture_output=True, text=True, check=True)
    small_mb, large_mb = map(int, done.stdout.split())
    assert large_mb - small_mb < 150
