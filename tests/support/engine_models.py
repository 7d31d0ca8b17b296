"""Random models of any architecture, and the same with transformers' own attention."""

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel


def saved(kind: str, path: Path, seed: int = 0, vocabulary: int = 97, **settings: object) -> Path:
    """A directory with a model of width 32, and of 2 layers if not told otherwise."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        **{"num_hidden_layers": 2, "max_position_embeddings": 256, **settings},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def plain(path: Path) -> PreTrainedModel:
    """The model with transformers' own attention."""
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    return model.eval()
