"""The model that the benchmarks share: 4.25 million parameters with random weights."""

from pathlib import Path

import torch

from shoal.run.demo_model.architecture import CHARACTERS, END, ROLES, Shape, character_tokenizer, save, untrained

SHAPE = Shape(width=256, layers=4, heads=4, feed_forward=1024)
STOPS = (END, "<|system|>", "<|tool|>")
VOCABULARY = len(CHARACTERS) + len(ROLES) + 2
"""Characters, roles, the end and the unknown token."""
HEAD_SCALE = 0.1


def write_bench_model(directory: Path) -> None:
    """Writes the model as a Hugging Face directory."""
    save(untrained(SHAPE, seed=0), directory)


def write_ending_model(directory: Path) -> None:
    """Writes the model with answers that end by themselves, of lengths that are nearly geometric.

    Three tokens end an answer (its generation config says so, which every framework reads). The head is scaled down
    until all tokens are equally likely to about 3 %, so that an answer ends at each token with one chance in 34.
    """
    model = untrained(SHAPE, seed=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(HEAD_SCALE)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = character_tokenizer().convert_tokens_to_ids(list(STOPS))
    save(model, directory)


def mean_length(most_tokens: int) -> float:
    """Tokens of an answer of the ending model, its last one included, when none is longer than `most_tokens`.

    Lengths are geometric with p = 3 / 102, cut at the budget: E = (1 - (1 - p)^most) / p.
    """
    p = len(STOPS) / VOCABULARY
    return float((1 - (1 - p) ** most_tokens) / p)
