"""Settings of training: each loss by its name with its own parameters, and the optimizer's side."""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Final, Literal, Self, TypeAlias, get_args

from pydantic import Field, field_validator, model_validator

from shoal.config.section import OwnName, Section

_Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


class _Bounded(Section):
    @model_validator(mode="after")
    def _above_1(self) -> Self:
        for name in ("dual_clip", "weight_cap"):
            if 0 < (bound := getattr(self, name, 0.0)) <= 1:
                raise ValueError(f"{name}: expected more than 1, or 0 for no bound, got {bound:g}")
        return self


class _Clipped(_Bounded):
    clip_low: float = Field(0.2, gt=0, lt=1, description="Ratios below 1 - clip_low are clipped.")
    clip_high: float = Field(0.28, gt=0, description="Ratios above 1 + clip_high are clipped.")
    dual_clip: float = Field(
        3.0, ge=0, description="Ratio above which negative advantages give no gradient (dual clip); 0 is off."
    )


class _Weighed(_Bounded):
    weight_cap: float = Field(2.0, ge=0, description="Bound on pi_theta / pi_behav; 0 is off.")
    weight_level: Literal["token", "sequence"] = Field(
        "token", description="Whether it is of each token or the product over each row."
    )
    over_cap: Literal["clamp", "mask", "band"] = Field(
        "clamp", description="Treatment of tokens above weight_cap; `band` also masks those below 1 / weight_cap."
    )


class GRPOLoss(_Clipped):
    """Clipped ratio of the trained to the behaviour weights (DAPO's clip-higher)."""

    name: Literal["grpo"] = "grpo"


class DecoupledLoss(_Weighed, _Clipped):
    """Clip around the proximal weights, importance-weighted to the behaviour ones (AReaL); the default."""

    name: Literal["decoupled"] = "decoupled"
    weight_cap: float = Field(5.0, ge=0, description="Bound on pi_prox / pi_behav; 0 is off.")
    behaviour_correction: Literal["on", "log_linear", "off_and_biased"] = Field(
        "on",
        description="Weighs tokens by pi_prox / pi_behav: exactly, interpolated by Versions, or not, which biases "
        "the gradient.",
    )


class DoubleSidedLoss(Section):
    """Direct importance sampling: tokens outside a band give no gradient (GLM-5)."""

    name: Literal["double_sided"] = "double_sided"
    clip_low: float = Field(0.3, gt=0, le=1, description="Ratios below 1 - clip_low are masked.")
    clip_high: float = Field(5.0, gt=0, description="Ratios above 1 + clip_high are masked.")


class GSPOLoss(_Clipped):
    """Clipped ratio of whole rows, the geometric mean over their tokens (GSPO)."""

    name: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0, lt=1, description="Ratios below 1 - clip_low are clipped.")
    clip_high: float = Field(4e-4, gt=0, description="Ratios above 1 + clip_high are clipped.")


class GMPOLoss(Section):
    """Geometric mean over a row of its clipped ratios (GMPO)."""

    name: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(0.4, gt=0, description="Log ratios below -clip_low are clipped where A < 0.")
    clip_high: float = Field(0.4, gt=0, description="Log ratios above clip_high are clipped where A > 0.")


class DPPOTVLoss(_Bounded):
    """Mask by the change of a token's probability (DPPO, binary total variation)."""

    name: Literal["dppo_tv"] = "dppo_tv"
    clip_low: float = Field(0.15, gt=0, description="Divergence above which tokens that became less likely are masked.")
    clip_high: float = Field(0.15, gt=0, description="Divergence above which tokens that became likelier are masked.")
    weight_cap: float = Field(20.0, ge=0, description="Bound on pi_theta / pi_behav; 0 is off.")


class DPPOKLLoss(DPPOTVLoss):
    """Mask by the binary KL divergence of a token's probability (DPPO)."""

    name: Literal["dppo_kl"] = "dppo_kl"  # type: ignore[assignment]
    clip_low: float = Field(0.05, gt=0, description="Divergence above which tokens that became less likely are masked.")
    clip_high: float = Field(0.05, gt=0, description="Divergence above which tokens that became likelier are masked.")


class M2POLoss(Section):
    """Mask the fewest tokens that bring the second moment of the log ratios within a bound (M2PO)."""

    name: Literal["m2po"] = "m2po"
    clip_high: float = Field(
        0.04,
        gt=0,
        description="Mean squared log ratio of the kept tokens that leave 1; the largest are masked.",
    )


class CISPOLoss(_Bounded):
    """REINFORCE with importance weights clamped from above (MiniMax-M1); every token keeps a gradient."""

    name: Literal["cispo"] = "cispo"
    weight_cap: float = Field(5.0, ge=0, description="Bound on pi_theta / pi_behav; 0 is off.")


class ReinforceLoss(_Weighed):
    """REINFORCE with truncated or masked importance weights of tokens or whole rows."""

    name: Literal["reinforce"] = "reinforce"


class SoftAdaptiveLoss(Section):
    """A smooth gate on the ratio instead of a clip (Soft Adaptive Policy Optimization)."""

    name: Literal["soft_adaptive"] = "soft_adaptive"


class PositiveOnlyLoss(Section):
    """Imitation of the model's own better answers: no ratio, and only advantages above 0 (RAFT)."""

    name: Literal["positive_only"] = "positive_only"


class DPOLoss(Section):
    """Direct preference optimization, for stages of preference pairs."""

    name: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0, description="Weight of the distance to the stage's first model.")


class OwnLoss(Section):
    """Your own function; see docs/guides/library.md."""

    name: Literal["own"] = "own"
    function: OwnName = Field(description="`module:function` or `file.py:function`, from Streams to a loss per token.")


LossConfig: TypeAlias = Annotated[
    GRPOLoss
    | DecoupledLoss
    | DoubleSidedLoss
    | GSPOLoss
    | GMPOLoss
    | DPPOTVLoss
    | DPPOKLLoss
    | M2POLoss
    | CISPOLoss
    | ReinforceLoss
    | SoftAdaptiveLoss
    | PositiveOnlyLoss
    | DPOLoss
    | OwnLoss,
    Field(discriminator="name"),
]


_RATE: Final = {"lr", "warmup_steps", "lr_schedule", "betas", "weight_decay", "max_grad_norm"}
_PROCESS: Final = {"lora", "tokens_per_microbatch", "offload", "gpus", "ranks", "backend"}
OWN_SETTINGS: Final[Mapping[str, frozenset[str]]] = {
    "sft": frozenset(_RATE | _PROCESS | {"steps", "groups_per_step", "minibatches", "loss_mean"}),
    "dpo": frozenset(_RATE | _PROCESS | {"steps", "groups_per_step"}),
}
"""Settings of training, besides the loss, that a supervised stage has; a DPO step is always one update."""
UNUSED: Final = ("rollout", "engine", "asynchrony", "reward", "eval", "swarm")
"""Sections of the run that a supervised stage does not use."""
LOSS_OF: Final[Mapping[str, str]] = {"sft": "positive_only", "dpo": "dpo"}

LOSSES: Mapping[str, type[Section]] = {
    kind.model_fields["name"].default: kind for kind in get_args(get_args(LossConfig)[0])
}


class KLConfig(Section):
    """Distance to the model that the run began with."""

    coefficient: float = Field(0.0, ge=0, description="Weight of the KL; 0 is off and loads no reference model.")
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Of KL(pi_theta, pi_ref) at one sampled token.")
    where: Literal["loss", "reward"] = Field("loss", description="Added to the loss, or taken off each token's return.")


class LoRAConfig(Section):
    """Low-rank adapters instead of all weights; own engines merge them."""

    rank: int = Field(0, ge=0, le=65536, description="Rank of each adapter; 0 trains all weights.")
    alpha: float = Field(32.0, gt=0, description="Adapters are scaled by alpha / rank.")
    targets: list[str] = Field([], description="Names of adapted layers, such as q_proj; all linear ones when empty.")


class CriticConfig(Section):
    """The value head of `train.advantage = "gae"` (PPO)."""

    gae_lambda: float = Field(1.0, ge=0, le=1, description="0 trusts the critic alone, 1 the rewards alone.")
    lr: float | None = Field(None, gt=0, le=1, description="Peak learning rate; train.lr when unset.")


class TrainConfig(Section):
    """The optimizer's side."""

    steps: int = Field(100, ge=1, description="Training steps of the run.")
    groups_per_step: int = Field(8, ge=1, description="Groups consumed by one step.")
    minibatches: int = Field(1, ge=1, description="Optimizer updates a step's groups are split into.")
    push_every: int = Field(1, ge=1, description="Steps between loads of new weights by the engines (K).")
    loss: LossConfig = Field(DecoupledLoss(), description="Loss by name, with its own parameters.")
    loss_mean: Literal["tokens", "rows", "budget", "sums"] | None = Field(
        None, description="Mean over tokens, over rows' own means, over rows of rollout.max_tokens, or over rows' sums."
    )
    kl: KLConfig = Field(KLConfig())
    teacher: str | None = Field(
        None,
        description="On-policy distillation in place of rewards: a model with the same tokens, or a URL up to /v1 of "
        "OpenAI's text completions.",
    )
    entropy_bonus: float = Field(0.0, ge=0, description="Weight of the entropy, subtracted from the loss.")
    advantage: Literal["grpo", "grpo_no_std", "rloo", "maxrl", "batch", "group_batch", "gae"] | OwnName = Field(
        "grpo",
        description="Baseline and scale: by group, by batch, from a critic (`gae`), or your `module:function`.",
    )
    turn_discount: float = Field(1.0, gt=0, le=1, description="Weight of a turn's reward for the turn before it.")
    critic: CriticConfig = Field(CriticConfig())
    lora: LoRAConfig = Field(LoRAConfig())
    router_replay: bool = Field(False, description="Train each token with the experts that sampled it (R3).")
    short_groups: Literal["pad", "keep"] = Field(
        "pad", description="`pad` replaces failed rollouts by repeated finished ones (GLM-5)."
    )
    overlong_tokens: int = Field(
        0, ge=0, description="Last tokens of rollout.max_tokens, over which the reward sinks by 1 (DAPO)."
    )
    dynamic_sampling: bool | Literal["pool"] = Field(
        False,
        description="`true` replaces groups of equal rewards (DAPO), up to a bound. `pool` asks those questions of a "
        "file whose rewards will likely differ.",
    )
    lr: float = Field(1e-6, gt=0, le=1, description="Peak learning rate.")
    warmup_steps: int = Field(
        0, ge=0, description="Updates over which the learning rate rises, at first and after each reset."
    )
    lr_schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="Decay to 0 over the remaining updates."
    )
    betas: tuple[_Decay, _Decay] = Field((0.9, 0.999), description="Adam's moving averages.")
    weight_decay: float = Field(0.0, ge=0, lt=1, description="AdamW's weight decay.")
    max_grad_norm: float = Field(
        1.0, ge=0, description="Global gradient norm above which gradients are scaled down; 0 is off."
    )
    reset_optimizer_at_push: bool = Field(False, description="Forget Adam's moments at every push (GLM-5).")
    tokens_per_microbatch: int | None = Field(None, ge=16, description="Packing budget; derived when unset.")
    offload: Literal["none", "optimizer"] = Field(
        "none", description="Keep Adam's moments in main memory between updates; refused without a GPU."
    )
    gpus: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="GPU numbers, one per rank; the first ones when empty."
    )
    ranks: int = Field(1, ge=1, le=1024, description="Trainer processes that share sharded weights and moments.")

    backend: Literal["sharded", "experts"] | Annotated[str, Field(pattern=r"^torchtitan(:[1-9]\d{0,2})?$")] = Field(
        "sharded",
        description="`sharded` gathers layers, `experts` sends tokens to experts, `torchtitan:N` splits layers over N "
        "ranks.",
    )

    def complaints(self) -> Iterator[str]:
        """Complaints about an advantage that does not fit another setting."""
        if self.loss.name == "gmpo" and (self.advantage == "gae" or self.turn_discount != 1):
            yield "train.loss: expected not 'gmpo' with advantages that differ within a row (gae, turn_discount)"
        if self.loss.name == "m2po" and (self.teacher_model or (self.kl.coefficient and self.kl.where == "reward")):
            yield "train.loss: expected not 'm2po' with a teacher or train.kl.where = 'reward', which change advantages"
        if self.advantage == "maxrl" and self.overlong_tokens:
            yield "train.overlong_tokens: expected 0 with train.advantage = 'maxrl', whose rewards are 0 and 1"
        if self.backend.startswith("torchtitan") and (self.lora.rank or self.router_replay):
            yield f"train.backend: expected 'sharded' with adapters or router_replay, got {self.backend!r}"

    @property
    def ranks_per_layer(self) -> int:
        """Ranks over which each layer is split."""
        return int(self.backend.partition(":")[2] or 1)

    @property
    def compares_within_groups(self) -> bool:
        """Whether rewards are compared within each group, rather than over the step."""
        return self.advantage not in ("batch", "gae")

    @property
    def teacher_url(self) -> str | None:
        """URL of a teacher that is asked by text; None for another, or none."""
        return self.teacher if self.teacher and self.teacher.startswith(("http://", "https://")) else None

    @property
    def teacher_model(self) -> str | None:
        """Teacher that the trainer loads; None for one at a URL, or none."""
        return None if self.teacher_url else self.teacher

    @field_validator("loss", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        """Accepts a bare name, `module:function`, and parameters without a name, which belong to the default loss."""
        if isinstance(value, str):
            return {"name": "own", "function": value} if ":" in value else {"name": value}
        return {"name": DecoupledLoss().name, **value} if isinstance(value, dict) else value


def foreign_setting(kind: str, given: Collection[str]) -> str:
    """Complaint about a given setting of training that a stage of a kind does not have; empty for none."""
    own = OWN_SETTINGS.get(kind, frozenset(TrainConfig.model_fields)) | {"loss"}
    foreign = sorted(name for name in given if name in TrainConfig.model_fields and name not in own)
    why = f"expected none in a stage of kind {kind!r}, which has no such setting; its own are {', '.join(sorted(own))}"
    return f"train.{foreign[0]}: {why}" if foreign else ""
