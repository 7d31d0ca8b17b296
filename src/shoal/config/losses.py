"""Each loss by its name, with the parameters that are its own."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field

from shoal.config.section import OwnName, Section

_DUAL_CLIP = Field(
    3.0,
    gt=1,
    description="Ratio above which a token of negative advantage gives no gradient (dual clip); a huge number is off.",
)


class GRPOLoss(Section):
    """Clipped ratio of the trained to the behaviour weights (DAPO's clip-higher)."""

    name: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, gt=0, lt=1, description="Ratios below 1 - clip_low are clipped.")
    clip_high: float = Field(0.28, gt=0, description="Ratios above 1 + clip_high are clipped.")
    dual_clip: float = _DUAL_CLIP


class DecoupledLoss(Section):
    """Decoupled PPO (AReaL): clip around the proximal weights, importance-weighted back to the behaviour ones."""

    name: Literal["decoupled"] = "decoupled"
    clip_low: float = Field(0.2, gt=0, lt=1, description="Ratios below 1 - clip_low are clipped.")
    clip_high: float = Field(0.28, gt=0, description="Ratios above 1 + clip_high are clipped.")
    dual_clip: float = _DUAL_CLIP
    weight_cap: float = Field(5.0, gt=1, description="Bound on pi_prox / pi_behav.")
    weight_floor: float = Field(0.0, ge=0, lt=1, description="Lower bound on it, below which tokens are masked.")
    weight_level: Literal["token", "sequence"] = Field(
        "token", description="Whether it is of each token or the product over each row."
    )
    over_cap: Literal["clamp", "mask"] = Field("clamp", description="Treatment of tokens above the bound.")
    proximal: Literal["recomputed", "log_linear"] = Field(
        "recomputed", description="Exact (free when minibatches = 1), or interpolated by versions."
    )
    behaviour_correction: Literal["on", "off_and_biased"] = Field(
        "on", description="Whether pi_prox / pi_behav weighs each token; turning it off biases the gradient."
    )


class DoubleSidedLoss(Section):
    """Direct double-sided importance sampling (GLM-5): tokens outside the band give no gradient."""

    name: Literal["double_sided"] = "double_sided"
    band_low: float = Field(0.3, gt=0, le=1, description="Ratios at or below 1 - band_low are masked.")
    band_high: float = Field(5.0, gt=0, description="Ratios at or above 1 + band_high are masked.")


class GSPOLoss(Section):
    """Clipped ratio of whole rows, the geometric mean over their tokens (GSPO)."""

    name: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0, lt=1, description="Ratios below 1 - clip_low are clipped.")
    clip_high: float = Field(4e-4, gt=0, description="Ratios above 1 + clip_high are clipped.")
    dual_clip: float = _DUAL_CLIP


class CISPOLoss(Section):
    """REINFORCE with each token's importance weight clamped from above (MiniMax-M1); every token keeps a gradient."""

    name: Literal["cispo"] = "cispo"
    ratio_cap: float = Field(5.0, gt=1, description="Bound on pi_theta / pi_behav.")


class ReinforceLoss(Section):
    """REINFORCE with truncated or masked importance weights of tokens or whole rows."""

    name: Literal["reinforce"] = "reinforce"
    weight_cap: float = Field(2.0, gt=1, description="Bound on pi_theta / pi_behav.")
    weight_level: Literal["token", "sequence"] = Field(
        "token", description="Whether it is of each token or the product over each row."
    )
    over_cap: Literal["clamp", "mask"] = Field("clamp", description="Treatment of tokens above the bound.")


class SoftAdaptiveLoss(Section):
    """A smooth gate on the ratio instead of a clip (Soft Adaptive Policy Optimization)."""

    name: Literal["soft_adaptive"] = "soft_adaptive"
    tau_positive: float = Field(1.0, gt=0, description="How fast the gate closes where the advantage is positive.")
    tau_negative: float = Field(1.05, gt=0, description="How fast it closes elsewhere.")


class PositiveOnlyLoss(Section):
    """Imitation of the model's own better answers: no ratio, and only advantages above 0 (RAFT)."""

    name: Literal["positive_only"] = "positive_only"


class OwnLoss(Section):
    """A function of the user's over the streams of a micro-batch; see docs/library.md."""

    name: Literal["own"] = "own"
    function: OwnName = Field(description="`module:function` or `file.py:function`, from Streams to a loss per token.")


LossConfig: TypeAlias = Annotated[
    GRPOLoss
    | DecoupledLoss
    | DoubleSidedLoss
    | GSPOLoss
    | CISPOLoss
    | ReinforceLoss
    | SoftAdaptiveLoss
    | PositiveOnlyLoss
    | OwnLoss,
    Field(discriminator="name"),
]


LOSSES: Mapping[str, type[Section]] = {
    kind.model_fields["name"].default: kind for kind in get_args(get_args(LossConfig)[0])
}
