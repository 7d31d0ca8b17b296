"""Published settings by name: `preset = "areal"` sets a paper's values, and the user's settings override them.

A preset has every setting that its paper prints, except lengths of texts and of the run, which belong to a model and
its data. It turns off defaults of Shoal's that the paper does not name: bounds, filters and padding.
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


_AREAL, _GLM5, _SAPO, _DAPO = "AReaL (arXiv 2505.24298)", "GLM-5 (arXiv 2602.15763)", "SAPO (arXiv 2509.08721)", "DAPO"
_DAPO += " (arXiv 2503.14476)"
_CLIP: JsonValue = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0}
_DECOUPLED: JsonValue = {"name": "decoupled", "clip_low": 0.2, "clip_high": 0.2, "weight_cap": 0.0, "dual_clip": 0.0}
_DOUBLE_SIDED: JsonValue = {"name": "double_sided", "clip_low": 0.3, "clip_high": 5.0}


def _unnamed(paper: str) -> dict[str, Setting]:
    """Defaults of Shoal's that the paper does not name, turned off."""
    return {
        "train.max_grad_norm": Setting(0.0, f"{paper} names no gradient norm"),
        "train.short_groups": Setting("keep", f"{paper} names no padding of groups"),
    }


PRESETS: Mapping[str, Mapping[str, Setting]] = {
    "areal": {
        **_unnamed(_AREAL),
        "asynchrony.max_staleness": Setting(8, f"{_AREAL}, section 7.1: eta of mathematics; 4 for code"),
        "asynchrony.late": Setting("train", "section 5.1: admission bounds staleness, and nothing is dropped later"),
        "engine.on_update": Setting(
            "recompute", "section 4.1: interruption discards the KV cache and computes it again"
        ),
        "rollout.group_size": Setting(16, "table 3: answers per prompt"),
        "rollout.temperature": Setting(1.0, "table 3"),
        "train.groups_per_step": Setting(512, "table 3: batch size in prompts"),
        "train.minibatches": Setting(4, "table 3: PPO minibatches"),
        "train.loss": Setting(_DECOUPLED, "equation 5, which has no cap and no dual clip; table 3: clip 0.2"),
        "train.advantage": Setting("batch", "table 3: normalised over the global batch"),
        "train.kl.coefficient": Setting(0.0, "table 3: no reference model"),
        "train.lr": Setting(2e-5, "table 3"),
        "train.lr_schedule": Setting("constant", "table 3"),
        "train.betas": Setting([0.9, 0.95], "table 3"),
        "train.weight_decay": Setting(0.05, "table 3"),
        "train.max_grad_norm": Setting(1.0, "table 3: gradient clip"),
    },
    "glm5": {
        **_unnamed(_GLM5),
        "asynchrony.late": Setting("drop", f"{_GLM5}, section 4.1.2: rollouts older than the bound are dropped"),
        "train.loss": Setting(
            _DOUBLE_SIDED,
            "section 4.1.2; prints no band: 0.3 and 5.0 are its follow-up's for reasoning (for code 0.8 and 3.0)",
        ),
        "train.advantage": Setting("grpo_no_std", "section 4.1: reward minus the group's mean"),
        "train.short_groups": Setting("pad", "section 4.1.2: groups are filled by repeating valid rollouts"),
        "train.reset_optimizer_at_push": Setting(
            True, "section 4.1: at every push, after K updates; K is not printed, so set `train.push_every`"
        ),
    },
    "sapo": {
        **_unnamed(_SAPO),
        "asynchrony.max_staleness": Setting(0, f"{_SAPO}, algorithm 1: a round samples, shares and then trains"),
        "rollout.group_size": Setting(8, "controlled experiment: 8 completions of a question"),
        "rollout.ratios": Setting("chance", "controlled experiment: specialties drawn uniformly, with replacement"),
        "train.groups_per_step": Setting(4, "figure 1: I = 4 local groups, the best split"),
        "train.loss": Setting(_CLIP, "controlled experiment: clip 0.2 and 0.28"),
        "train.advantage": Setting("grpo", "controlled experiment: GRPO"),
        "train.kl.coefficient": Setting(0.0, "controlled experiment: no KL"),
        "train.lr": Setting(
            1e-3, "controlled experiment: Adam's default; the released code of that time had 1e-6 to 1e-5"
        ),
        "train.lr_schedule": Setting("constant", "controlled experiment: Adam's default"),
        "train.betas": Setting([0.9, 0.999], "controlled experiment: Adam's default"),
        "train.weight_decay": Setting(0.0, "controlled experiment: Adam, not AdamW"),
        "swarm.external_groups": Setting(4, "figure 1: J = 4 external groups"),
        "swarm.share": Setting("all", "controlled experiment: every own group is shared"),
        "swarm.take": Setting("uniform", "controlled experiment: by chance among groups with an advantage"),
        "swarm.credit": Setting("group", "algorithm 1: external groups are trained as own ones are"),
        "swarm.datasets": Setting("any", "algorithm 1: the swarm's groups are taken of any data set"),
        "swarm.checkers": Setting(
            ["exact", "number", "math", "regex", "code"], "algorithm 1: truths and how to verify them are shared"
        ),
        "swarm.round_offers": Setting(
            28, "controlled experiment: 8 nodes in rounds, so 7 peers that share 4 groups each"
        ),
        "swarm.wait_s": Setting(600.0, "controlled experiment: rounds are synchronous; the bound is for lost nodes"),
    },
    "dapo": {
        **_unnamed(_DAPO),
        "asynchrony.max_staleness": Setting(0, f"{_DAPO}, algorithm 1: the policy before the step samples"),
        "rollout.group_size": Setting(16, "section 4.1: responses per prompt"),
        "train.groups_per_step": Setting(512, "section 4.1: prompt batch size"),
        "train.minibatches": Setting(16, "section 4.1: 16 gradient updates per rollout step"),
        "train.loss": Setting(_CLIP, "section 3.1: clip-higher; no dual clip is named"),
        "train.advantage": Setting("grpo", "equation 9"),
        "train.loss_mean": Setting("tokens", "section 3.3: token-level loss"),
        "train.dynamic_sampling": Setting(True, "section 3.2: groups of equal rewards are sampled anew"),
        "train.overlong_tokens": Setting(
            0.2, "section 4.1: soft overlong punishment, 4,096 of 20,480 tokens", share_of_max_tokens=True
        ),
        "train.kl.coefficient": Setting(0.0, "section 2.3: the KL term is removed"),
        "train.lr": Setting(1e-6, "section 4.1"),
        "train.lr_schedule": Setting("constant", "section 4.1"),
        "train.warmup_steps": Setting(320, "section 4.1: linear over 20 rollout steps of 16 updates"),
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
