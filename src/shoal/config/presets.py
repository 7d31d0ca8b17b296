"""Published settings by name: `preset = "areal"` sets a paper's values, and the user's settings override them.

Learning rates, batch sizes and lengths belong to a model and its data: presets leave them alone, unless the method is
about their ratio.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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


_NO_KL = "no distance to a reference model"
_CLIP: JsonValue = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28}
_DECOUPLED: JsonValue = {"name": "decoupled", "clip_low": 0.2, "clip_high": 0.2}
_DOUBLE_SIDED: JsonValue = {"name": "double_sided", "clip_low": 0.3, "clip_high": 5.0}

PRESETS: Mapping[str, Mapping[str, Setting]] = {
    "areal": {
        "asynchrony.max_staleness": Setting(8, "AReaL (arXiv 2505.24298), eta of its mathematics runs"),
        "train.loss": Setting(_DECOUPLED, "AReaL, equation 5; one epsilon of 0.2"),
        "train.minibatches": Setting(4, "AReaL, table of hyperparameters: PPO minibatches"),
    },
    "glm5": {
        "asynchrony.late": Setting("drop", "GLM-5 (arXiv 2602.15763), section 4.1.2: stale rollouts are dropped"),
        "train.loss": Setting(
            _DOUBLE_SIDED,
            "GLM-5, section 4.1.2; the band is that of its follow-up for reasoning",
        ),
        "train.advantage": Setting("grpo_no_std", "GLM-5: reward minus the group's mean"),
        "train.short_groups": Setting("pad", "GLM-5, section 4.1.2: groups are filled by repeating rollouts"),
        "train.push_every": Setting(4, "GLM-5: weights go out every K updates; K itself is not published"),
        "train.reset_optimizer_at_push": Setting(True, "GLM-5: the optimizer starts anew at every push"),
    },
    "sapo": {
        "train.loss": Setting(_CLIP, "SAPO (arXiv 2509.08721), controlled experiments: clip 0.2 and 0.28"),
        "train.advantage": Setting("grpo", "SAPO: GRPO"),
        "train.kl.coefficient": Setting(0.0, f"SAPO: {_NO_KL}"),
        "train.weight_decay": Setting(0.0, "SAPO: Adam"),
        "rollout.group_size": Setting(8, "SAPO: 8 completions of a question"),
        "train.groups_per_step": Setting(4, "SAPO: 4 local groups, the best split of its figure 1"),
        "swarm.external_groups": Setting(4, "SAPO: 4 external groups"),
        "swarm.share": Setting("all", "SAPO, algorithm 1"),
        "swarm.take": Setting("uniform", "SAPO: uniform among groups with an advantage, of any author"),
        "swarm.credit": Setting("group", "SAPO: external groups are trained as own ones are"),
    },
    "dapo": {
        "train.loss": Setting(_CLIP, "DAPO (arXiv 2503.14476): clip-higher"),
        "train.advantage": Setting("grpo", "DAPO, equation 9"),
        "train.loss_mean": Setting("tokens", "DAPO: token-level loss"),
        "train.dynamic_sampling": Setting(True, "DAPO: groups of equal rewards are sampled anew"),
        "train.overlong_tokens": Setting(
            0.2, "DAPO: soft overlong punishment, 4,096 of 20,480 tokens", share_of_max_tokens=True
        ),
        "train.kl.coefficient": Setting(0.0, f"DAPO: {_NO_KL}"),
    },
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
