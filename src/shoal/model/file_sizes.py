"""Sizes of a causal language model, read from its files without torch."""

import re
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from safetensors import SafetensorError, safe_open

from shoal.errors import ModelError

ROUTER = re.compile(r"\.layers\.(\d+)\.(?!self_attn).*\b(?:gate|router)\.weight$")

Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class Sizes(msgspec.Struct, frozen=True):
    """Sizes by their names in config.json."""

    num_attention_heads: Positive
    num_hidden_layers: Positive
    hidden_size: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    vocab_size: Positive | None = None
    max_position_embeddings: Positive | None = None
    original_max_position_embeddings: Positive | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    num_experts_per_tok: Positive | None = None

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers in the KV cache per token of context."""
        width = self.head_dim or self.hidden_size // self.num_attention_heads
        return 2 * self.num_hidden_layers * (self.num_key_value_heads or self.num_attention_heads) * width


def longest_row(config: object) -> int | None:
    """Most tokens of a row, from `Sizes` or transformers' config; None without a limit.

    With longrope (Phi 3 and 4) one row above the original length changes the rotation of every row of its pass.
    """
    rotation = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    limits = [getattr(config, "max_position_embeddings", None)]
    if {rotation.get("rope_type"), rotation.get("type")} & {"longrope", "su"}:
        original = "original_max_position_embeddings"
        limits += [getattr(config, original, None), rotation.get(original)]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def sizes_of(model_dir: Path) -> Sizes:
    """Reads the language model's part of config.json. Raises `ModelError`."""
    path = model_dir / "config.json"
    try:
        settings = msgspec.json.decode(path.read_bytes())
        return msgspec.convert(settings.get("text_config", settings) if isinstance(settings, dict) else settings, Sizes)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: expected the sizes of a causal language model: {error}") from None


def shapes_of(model_dir: Path) -> dict[str, list[int]]:
    """Reads every tensor's shape from the headers of the safetensors files. Raises `ModelError`."""
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ModelError(f"model directory {str(model_dir)!r} has no safetensors file")
    shapes: dict[str, list[int]] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(f"{file}: expected whole safetensors weights: {error}") from None
    if not shapes:
        raise ModelError(f"{files[0]}: expected weights, got no tensor")
    return shapes


def router_experts(model_dir: Path) -> dict[int, int]:
    """Number of experts by layer, of the layers with a router; from the shapes of the weights. Raises `ModelError`."""
    shapes, layers = shapes_of(model_dir).items(), sizes_of(model_dir).num_hidden_layers  # files may have more layers
    found = {int(at[1]): shape[0] for name, shape in shapes if (at := ROUTER.search(name)) and len(shape) == 2}
    return {layer: found[layer] for layer in sorted(found) if layer < layers}
