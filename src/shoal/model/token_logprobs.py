"""Logprobs of chosen tokens and entropies, from logits of any float type, with a gradient computed by hand.

Autograd's own way through a softmax makes about ten tensors of the size of the logits, most of them float32. Here a
block of rows that fits the caches is float32 at a time, and only the logits themselves are kept for the gradient.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_LOGITS = 1 << 18
"""Logits of one block on a CPU: 1 MiB in float32, about a core's own cache."""
BLOCK_LOGITS_OF_GPU = 1 << 26
MOST_NATS = 80.0
"""Bound of a logit above that of the sampled token: its exponential is finite in float32."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens that could be sampled at N places; at a place without any all could."""

    id_M: Tensor
    at_M: Tensor
    """Place of each of them."""
    some_N: Tensor
    """Whether a place has any (bool)."""

    @classmethod
    def of(cls, kept: Sequence[bytes], device: torch.device | str) -> "Kept":
        """The tokens of each place, as in `Sample.kept`."""
        each = [np.frombuffer(ids, np.uint32) for ids in kept]
        count_N = torch.tensor([len(ids) for ids in each])
        id_M = torch.from_numpy(np.concatenate(each).astype(np.int64))
        at_M = torch.arange(len(each)).repeat_interleave(count_N)
        id_M, at_M, some_N = (one.to(device, non_blocking=True) for one in (id_M, at_M, count_N.bool()))
        return cls(id_M, at_M, some_N)


def logprobs_among(logits_UV: Tensor, at_N: Tensor, token_N: Tensor, kept: Kept, temperature: float) -> Tensor:
    """Logprobs [N] (nats, float32) of tokens among those that could be sampled in their places, themselves included.

    log p = -log sum_M exp((z_M - z) / temperature), and 0 at a place without any.
    """
    z_N = logits_UV[at_N, token_N].float()
    z_M = logits_UV[at_N[kept.at_M], kept.id_M].float()
    ratio_M = ((z_M - z_N[kept.at_M]) / temperature).clamp(max=MOST_NATS).exp()
    sum_N = torch.zeros_like(z_N).index_add(0, kept.at_M, ratio_M)
    return -torch.where(kept.some_N, sum_N, 1.0).log()


def token_logprobs(
    logits_UV: Tensor,
    at_N: Tensor,
    token_N: Tensor,
    *,
    temperature: float = 1.0,
    entropy: Literal["value", "gradient"] | None = "gradient",
) -> tuple[Tensor, Tensor]:
    """Logprobs [N] of tokens in rows `at_N` of the logits, and the entropies [U] of all rows: nats, float32.

    logp = x[token] - lse(x),   H = lse(x) - sum(p x),   x = logits / temperature
    dlogp/dx_v = [v = token] - p_v,   dH/dx_v = -p_v (log p_v + H)

    Entropies are 0 unless asked for, and have a gradient only as `gradient`. What the gradient needs overwrites the
    logits, and then the gradient itself, so a second pass through the graph is refused.
    """
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(logits_UV, at_N, token_N, temperature, entropy)  # type: ignore[no-untyped-call]
    return found


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_UV: Tensor, at_N: Tensor, token_N: Tensor, temperature: float, entropy: str | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.of_entropy = temperature, entropy == "gradient"
        keeps_exp = ctx.needs_input_grad[0] and not ctx.of_entropy
        chosen_N = logits_UV[at_N, token_N].float() / temperature
        sum_U, lse_U = (torch.empty(len(logits_UV), device=logits_UV.device) for _ in range(2))
        entropy_U = torch.zeros_like(lse_U)
        for rows, x_UV in _blocks(logits_UV, temperature):
            top_U1 = x_UV.amax(-1, keepdim=True)
            x_UV.sub_(top_U1)
            exp_UV = x_UV.exp()
            torch.sum(exp_UV, -1, out=sum_U[rows])
            log_U = sum_U[rows].log()
            lse_U[rows] = log_U + top_U1[:, 0]
            if entropy is not None:
                entropy_U[rows] = log_U - torch.linalg.vecdot(exp_UV, x_UV) / sum_U[rows]
            if keeps_exp:
                logits_UV[rows] = exp_UV
        logp_N = chosen_N - lse_U[at_N]
        ctx.save_for_backward(logits_UV, at_N, token_N, logp_N, sum_U, lse_U, entropy_U)
        if not ctx.of_entropy:
            ctx.mark_non_differentiable(entropy_U)
        return logp_N, entropy_U

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor | None, grad_U: Tensor | None) -> tuple[Tensor | None, ...]:
        """Takes the gradients of the outputs."""
        logits_UV, at_N, token_N, logp_N, sum_U, lse_U, value_U = ctx.saved_tensors
        weight_U = torch.zeros_like(lse_U)  # of each row's probabilities
        if grad_N is not None:
            weight_U.index_add_(0, at_N, grad_N, alpha=-1 / ctx.temperature)

        if grad_U is not None:
            grad_U = grad_U * (-1 / ctx.temperature)

        def of_probabilities(rows: slice | Tensor, x: Tensor) -> Tensor:
            """Gradient -p (G + G_H (log p + H)) / temperature, where x is log p, which it overwrites."""
            shape = (-1, *(1,) * (x.ndim - 1))
            weight = weight_U[rows].view(shape)
            if grad_U is not None:
                weight = (x + value_U[rows].view(shape)).mul_(grad_U[rows].view(shape)).add_(weight)
            return x.exp_().mul_(weight)

        if grad_N is not None:
            # Both terms of a chosen token nearly cancel: they are added in float32. A token that is chosen again in
            # the same row has the sum of its gradients each time.
            cell_N, order_N = torch.sort(at_N * logits_UV.shape[1] + token_N)
            of_N = torch.empty_like(order_N).index_copy_(0, order_N, _steps(cell_N))
            sum_N = torch.zeros_like(logp_N).index_add_(0, of_N, grad_N / ctx.temperature)
            chosen_N = of_probabilities(at_N, logp_N.clone()).add_(sum_N[of_N])
        # The gradient overwrites the saved tensor: autograd refuses a second pass, so it is not needed again.
        if ctx.of_entropy:
            for rows, x_UV in _blocks(logits_UV, ctx.temperature):
                logits_UV[rows] = of_probabilities(rows, x_UV.sub_(lse_U[rows, None]))
        else:
            weight_U.div_(sum_U)
            for rows, exp_UV in _blocks(logits_UV, 1.0):
                logits_UV[rows] = exp_UV.mul_(weight_U[rows, None])
        if grad_N is not None:
            logits_UV[at_N, token_N] = chosen_N.to(logits_UV.dtype)
        return logits_UV, None, None, None, None


def _steps(sorted_N: Tensor) -> Tensor:
    """Number of different values before each one.

    >>> _steps(torch.tensor([3, 3, 7, 9, 9])).tolist()
    [0, 0, 1, 2, 2]
    """
    return torch.cat([sorted_N.new_zeros(1), (sorted_N[1:] != sorted_N[:-1]).cumsum(0)])[: len(sorted_N)]


def _blocks(logits_UV: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows, each with a float32 copy of its logits over the temperature."""
    most = BLOCK_LOGITS if logits_UV.device.type == "cpu" else BLOCK_LOGITS_OF_GPU
    count = max(1, most // max(1, logits_UV.shape[1]))
    for start in range(0, len(logits_UV), count):
        rows = slice(start, start + count)
        x_UV = logits_UV[rows].to(torch.float32, copy=True)
        yield rows, x_UV if temperature == 1.0 else x_UV.div_(temperature)
