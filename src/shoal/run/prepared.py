"""Parts of a run that need no process of their own, and what model files tell of a model without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue
from safetensors import SafetensorError, safe_open

from shoal.config import Config
from shoal.errors import ModelError
from shoal.interfaces import Environment
from shoal.model.chat_template import ChatRenderer
from shoal.run.devices import Devices
from shoal.tasks.mixture import Mixture
from shoal.types import Sampling


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

    @property
    def environments(self) -> Mapping[str, Environment]:
        """Environments of the run, by name."""
        services = self.service.services if isinstance(self.service, Mixture) else (self.service,)
        return {one.name: one for one in services}


def sampling_of(config: Config, prepared: Prepared) -> Sampling:
    """Sampling of a run's training."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    settings = config.rollout.model_dump(include=set(names))
    return Sampling(**settings, stop_token_ids=prepared.renderer.stop_token_ids, seed=config.seed)


def settings_of(model_dir: Path) -> Mapping[str, JsonValue]:
    """Reads the language model's part of config.json. Raises `ModelError`."""
    path = model_dir / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: expected a JSON object: {error}") from None
    inner = settings.get("text_config", settings) if isinstance(settings, dict) else None
    if not isinstance(inner, dict):
        raise ModelError(
            f"{path}: expected a JSON object, got {'a list' if isinstance(settings, list) else settings!r}"
        )
    return inner


def number_in(settings: Mapping[str, JsonValue], name: str) -> int | None:
    """Reads an optional count of config.json. Raises `ModelError` for a value of another type."""
    value = settings.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ModelError(f"config.json: {name}: expected a whole number of at least 1, got {value!r}")
    return value


def kv_bytes_per_token(settings: Mapping[str, JsonValue], number_bytes: int) -> int:
    """Bytes of KV cache per token of context. Raises `ModelError` when config.json lacks a size."""
    found = {name: number_in(settings, name) for name in ("num_attention_heads", "num_hidden_layers", "hidden_size")}
    for name, value in found.items():
        if value is None:
            raise ModelError(f"config.json: expected {name}, as causal language models have, got none")
    heads, layers, width = (value or 0 for value in found.values())
    width = number_in(settings, "head_dim") or width // heads
    return 2 * layers * (number_in(settings, "num_key_value_heads") or heads) * width * number_bytes


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
