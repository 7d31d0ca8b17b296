"""Published settings by name, of presets.toml: a preset fills in what the user's settings leave open."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from shoal.config.tree import place_of

DEFAULT_MAX_TOKENS = 256
"""Most tokens of one answer if the configuration does not set it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a preset, with the source of its value."""

    value: JsonValue
    source: str
    share_of_max_tokens: bool = False
    """True if the value is a share of `rollout.max_tokens`, rounded down."""


PRESETS: Mapping[str, Mapping[str, Setting]] = {
    name: {key: Setting(**setting) for key, setting in settings.items()}
    for name, settings in tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8")).items()
}


def set_preset(tree: dict[str, JsonValue]) -> None:
    """Fills in the preset's settings that the tree does not set; validation refuses an unknown preset."""
    rollout = tree.get("rollout")
    max_tokens = rollout.get("max_tokens") if isinstance(rollout, dict) else None
    for key, setting in PRESETS.get(str(tree.get("preset")), {}).items():
        value = setting.value
        if setting.share_of_max_tokens and isinstance(value, float):
            value = int(value * (max_tokens if isinstance(max_tokens, int) else DEFAULT_MAX_TOKENS))
        node, at = place_of(key, tree)
        own = node.setdefault(at, value)
        if isinstance(own, dict) and isinstance(value, dict) and own.get("name", value["name"]) == value["name"]:
            node[at] = {**value, **own}  # tables of one kind are merged
