"""Losses of the Tinker API: sums over the target tokens of a datum. Source: the Tinker documentation, "Losses".

N is the number of target tokens and K the number of targets of one position; K is absent for one target.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shoal.errors import RequestRefused

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]
MOST_FLOAT = torch.finfo(torch.float32).max
WITHOUT_DEFINITION = ("stable_reinforce", "custom")
"""Names in the package's list whose definition is not published."""


def cross_entropy(logp: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-sum w log p.   [N] or [N, K]. With w = -dL/dlog p it has the gradient of any loss L of the logprobs."""
    return -(logp * inputs["weights"]).sum()


def importance_sampling(logp_N: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-sum (p / q) A.   [N]"""
    return -((logp_N - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def ppo(logp_N: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-sum min(r A, clip(r) A) with r = p / q.   [N]"""
    return _clipped((logp_N - inputs["logprobs"]).exp(), inputs["advantages"], settings)


def cispo(logp_N: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-sum sg[clip(p / q)] log p A.   [N]"""
    ratio_N = (logp_N.detach() - inputs["logprobs"]).exp()
    kept_N = ratio_N.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -(kept_N * logp_N * inputs["advantages"]).sum()


def dro(logp_N: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-sum (log p A - beta / 2 log^2(p / q)).   [N]"""
    square_N = (logp_N - inputs["logprobs"]) ** 2
    return -(logp_N * inputs["advantages"] - 0.5 * settings["beta"] * square_N).sum()


def gspo(logp_N: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """PPO with one ratio for the sequence, the geometric mean over the tokens that `sequence_ratio_mask` marks.   [N]

    Source: GSPO-token (arXiv 2507.18071, equation 14).
    """
    marked_N = inputs["sequence_ratio_mask"] != 0
    mean = (logp_N.detach() - inputs["logprobs"])[marked_N].mean()
    return _clipped((mean + logp_N - logp_N.detach()).exp(), inputs["advantages"], settings)


def _clipped(ratio_N: Tensor, advantage_N: Tensor, settings: Settings) -> Tensor:
    kept_N = ratio_N.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -torch.minimum(ratio_N * advantage_N, kept_N * advantage_N).sum()


CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
POLICY = ("logprobs", "advantages")
LOSSES: Mapping[str, tuple[Callable[[Tensor, Inputs, Settings], Tensor], tuple[str, ...], Settings]] = {
    "cross_entropy": (cross_entropy, ("weights",), {}),
    "importance_sampling": (importance_sampling, POLICY, {}),
    "ppo": (ppo, POLICY, CLIP),
    "cispo": (cispo, POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": (dro, POLICY, {"beta": 0.05}),
    "gspo": (gspo, (*POLICY, "sequence_ratio_mask"), CLIP),
}
"""Function, tensors that each datum brings beside `target_tokens`, and settings with their defaults."""


def settings_of(name: str, given: Mapping[str, float | str]) -> Settings:
    """Settings of a loss with defaults filled in. Raises `RequestRefused`, naming the loss or the setting."""
    if name not in LOSSES:
        why = " (it has no published definition)" if name in WITHOUT_DEFINITION else ""
        raise RequestRefused(f"loss_fn: expected one of {', '.join(LOSSES)}; got {name!r}{why}")
    settings = dict(LOSSES[name][2])
    for key, value in given.items():
        if key not in settings:
            raise RequestRefused(f"loss_fn_config: {name} has {', '.join(settings) or 'no settings'}; got {key!r}")
        settings[key] = finite(f"loss_fn_config.{key}", value)
    return settings


def finite(name: str, value: float | str) -> float:
    """The number that a setting is. Raises `RequestRefused` for text, NaN, and what float32 does not hold."""
    if isinstance(value, str) or not abs(value) <= MOST_FLOAT:
        raise RequestRefused(f"{name}: expected a finite number up to {MOST_FLOAT:g}, got {value!r}")
    return value


def check_inputs(name: str, targets: Tensor, inputs: Inputs) -> None:
    """Raises `RequestRefused` when a tensor of a datum is missing, or has another shape than the targets."""
    wanted = LOSSES[name][1]
    for field in wanted:
        if field not in inputs:
            raise RequestRefused(f"loss_fn_inputs: {name} expects {', '.join(wanted)}; {field} is missing")
        if inputs[field].shape != targets.shape:
            expected, came = list(targets.shape), list(inputs[field].shape)
            raise RequestRefused(f"loss_fn_inputs.{field}: expected the shape of target_tokens, {expected}; got {came}")
    if name == "gspo" and not inputs["sequence_ratio_mask"].any():
        raise RequestRefused("sequence_ratio_mask: expected at least one token that is not 0")


def loss_sum(name: str, logp: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Loss of one datum whose inputs were checked."""
    return LOSSES[name][0](logp, {field: inputs[field].to(logp.device) for field in LOSSES[name][1]}, settings)
