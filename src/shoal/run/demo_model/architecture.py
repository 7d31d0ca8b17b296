"""Small models are made from nothing where no pretrained weights are at hand: demo, benchmarks and tests.

The result is an ordinary Hugging Face directory: Qwen2's architecture, a tokenizer with one token per printable
character, and a chat template in which each role is one token.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
ROLES = ("system", "user", "assistant", "tool")
END = "<|end|>"
UNKNOWN = "<|unknown|>"
PAIRS = [
    *("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd"),
    *("ti", "es", "or", "te", "of", "ed", "is", "it", "al", "ar"),
]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    + END
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


ModelType: TypeAlias = Literal["qwen2", "seed_oss"]
"""Two names of one architecture. For "qwen2", AutoTokenizer puts Qwen's own tokenizer in the place of the saved one."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    feed_forward: int = 384
    context: int = 1024
    rope_theta: float = 10000.0
    model_type: ModelType = "qwen2"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token per printable ASCII character and newline, and an unknown token."""
    return with_pieces([], TEMPLATE)


def pair_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a second tokenizer: some pairs of characters are one token; names, ids and template differ."""
    template = TEMPLATE.replace(END, "</s>").replace("<|", "<").replace("|>", ">")
    return _tokenizer(["<unk>", "</s>", *(f"<{role}>" for role in ROLES)], CHARACTERS[::-1], PAIRS, template)


def with_pieces(pieces: Sequence[str], template: str) -> PreTrainedTokenizerFast:
    """Builds a tokenizer of characters and longer pieces, of which an earlier one wins, with a template."""
    return _tokenizer([UNKNOWN, END, *(f"<|{role}|>" for role in ROLES)], CHARACTERS, list(pieces), template)


def _tokenizer(specials: list[str], characters: str, pairs: list[str], template: str) -> PreTrainedTokenizerFast:
    """Builds a tokenizer of characters and pairs; the special tokens begin with those of the unknown and the end."""
    unknown, end, *roles = specials
    vocabulary = {token: i for i, token in enumerate([*specials, *characters, *pairs])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*map(re.escape, pairs), r"[\s\S]"])), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end, unk_token=unknown, extra_special_tokens=roles
    )
    wrapped.chat_template = template
    return wrapped


def untrained(shape: Shape, seed: int, tokenizer: PreTrainedTokenizerFast | None = None) -> PreTrainedModel:
    """Builds a model with random weights, for the character tokenizer by default."""
    tokenizer = tokenizer or character_tokenizer()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        shape.model_type,
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.context,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attention_dropout=0.0,
        **({"residual_dropout": 0.0, "head_dim": shape.width // shape.heads} if shape.model_type == "seed_oss" else {}),
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def save(model: PreTrainedModel, directory: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    """Writes the model with its tokenizer (the character tokenizer by default) as a Hugging Face directory."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    (tokenizer or character_tokenizer()).save_pretrained(directory)
