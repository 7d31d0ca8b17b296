"""Parts of a run that need no process, and facts of model files, read without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from safetensors import SafetensorError, safe_open

from shoal.config import Config
from shoal.errors import ModelError
from shoal.interfaces import Environment
from shoal.model.chat_template import ChatRenderer
from shoal.run.devices import Devices
from shoal.tasks.mixture import Mixture
from shoal.types import Sampling
from shoal.weights.store import ADAPTER_FILE, FILE

Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Checked parts of a run."""

    model_dir: Path
    renderer: ChatRenderer
    service: Environment
    max_model_len: int
    longest_prompt: int
    """Tokens of the longest prompt among the probed tasks."""
    devices: Devices = field(default_factory=Devices)
    token: str = ""
    """Token of the run, which roles of other processes must have."""

    @property
    def environments(self) -> Mapping[str, Environment]:
        """Environments of the run, by name."""
        services = self.service.services if isinstance(self.service, Mixture) else (self.service,)
        return {one.name: one for one in services}


def sampling_of(config: Config, prepared: Prepared) -> Sampling:
    """Sampling of a run's training."""
    rollout, stops = config.rollout, prepared.renderer.stop_token_ids
    return Sampling(
        max_tokens=rollout.max_tokens, temperature=rollout.temperature, stop_token_ids=stops, seed=config.seed
    )


def version_file(config: Config) -> str:
    """Name of the file of a Version: an adapter where all engines that load it have its base."""
    others = (config.engine.urls and not config.engine.adapters) or config.cluster.listen
    return ADAPTER_FILE if config.train.lora.rank and not others else FILE


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a causal language model, by their names in config.json."""

    num_attention_heads: Positive
    num_hidden_layers: Positive
    hidden_size: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    intermediate_size: Positive | None = None
    vocab_size: Positive | None = None
    max_position_embeddings: Positive | None = None
    model_type: str = ""

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers in the KV cache per token of context."""
        return 2 * self.num_hidden_layers * self.widths[1]

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers in all queries of a token, and in all its keys."""
        width = self.head_dim or self.hidden_size // self.num_attention_heads
        return self.num_attention_heads * width, (self.num_key_value_heads or self.num_attention_heads) * width

    @property
    def feed_forward(self) -> int:
        """Width of the feed-forward layers; of one expert in a mixture."""
        return self.intermediate_size or 4 * self.hidden_size


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
