"""Losses that a client chooses for each of its requests: sums over the target tokens of one datum. Pure.

N is the number of target tokens and K the number of targets of one position; K is absent for one target. p are the
probabilities under the weights being trained, q those at sampling. Source: the Tinker
documentation, "Losses".
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]


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
"""Function, tensors of each datum in the shape of its targets, and settings with their defaults."""
