"""Logprobs of chosen tokens and entropies, from logits of any float type, with a gradient computed by hand.

Autograd's own way through a softmax makes about ten tensors of the size of the logits, most of them float32. Here a
block of rows that fits the caches is float32 at a time, and only the logits themselves are kept for the gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_LOGITS = 1 << 18
"""Logits of one block on a CPU: 1 MiB in float32, about a core's own cache."""
BLOCK_LOGITS_OF_GPU = 1 << 26


def token_logprobs(
    logits_UV: Tensor, at_N: Tensor, token_N: Tensor, *, temperature: float = 1.0, entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Logprobs [N] of tokens in rows `at_N` of the logits, and the entropies [U] of all rows: nats, float32.

    logp = x[token] - lse(x),   H = lse(x) - sum(p x),   x = logits / temperature
    dlogp/dx_v = [v = token] - p_v,   dH/dx_v = -p_v (log p_v + H)

    Entropies are 0 unless asked for. The gradient overwrites the logits, so a second pass through the graph is refused.
    """
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(logits_UV, at_N, token_N, temperature, entropy)  # type: ignore[no-untyped-call]
    return found


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_UV: Tensor, at_N: Tensor, token_N: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        lse_U = torch.empty(len(logits_UV), device=logits_UV.device)
        entropy_U = torch.zeros_like(lse_U)
        for rows, x_UV in _blocks(logits_UV, temperature):
            top_U1 = x_UV.amax(-1, keepdim=True)
            x_UV.sub_(top_U1)
            p_UV = x_UV.exp()
            sum_U = p_UV.sum(-1)
            log_U = sum_U.log()
            lse_U[rows] = log_U + top_U1[:, 0]
            if entropy:
                entropy_U[rows] = log_U - torch.linalg.vecdot(p_UV, x_UV) / sum_U
        ctx.save_for_backward(logits_UV, at_N, token_N, lse_U, entropy_U)
        ctx.temperature = temperature
        return logits_UV[at_N, token_N].float() / temperature - lse_U[at_N], entropy_U

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logp_N: Tensor | None, entropy_U: Tensor | None) -> tuple[Tensor | None, ...]:
        """Takes the gradients of the outputs."""
        logits_UV, at_N, token_N, lse_U, value_U = ctx.saved_tensors
        weight_U = torch.zeros_like(lse_U)  # of each row's probabilities
        if logp_N is not None:
            weight_U.index_add_(0, at_N, logp_N, alpha=-1 / ctx.temperature)

        if entropy_U is not None:
            entropy_U = entropy_U * (-1 / ctx.temperature)

        def of_probabilities(rows: slice | Tensor, x: Tensor) -> Tensor:
            """Gradient -p (G + G_H (log p + H)) / temperature, where x is log p, which it overwrites."""
            shape = (-1, *(1,) * (x.ndim - 1))
            weight = weight_U[rows].view(shape)
            if entropy_U is not None:
                weight = (x + value_U[rows].view(shape)).mul_(entropy_U[rows].view(shape)).add_(weight)
            return x.exp_().mul_(weight)

        if logp_N is not None:
            # Both terms of a chosen token nearly cancel: they are added in float32.
            cell_M, of_N = torch.unique(at_N * logits_UV.shape[1] + token_N, return_inverse=True)
            row_M, token_M = cell_M // logits_UV.shape[1], cell_M % logits_UV.shape[1]
            x_M = logits_UV[row_M, token_M].float() / ctx.temperature - lse_U[row_M]
            grad_M = of_probabilities(row_M, x_M).index_add_(0, of_N, logp_N / ctx.temperature)
        # The gradient takes the place of the logits, which nobody needs any more: autograd refuses a second pass.
        for rows, x_UV in _blocks(logits_UV, ctx.temperature):
            logits_UV[rows] = of_probabilities(rows, x_UV.sub_(lse_U[rows, None]))
        if logp_N is not None:
            logits_UV[row_M, token_M] = grad_M.to(logits_UV.dtype)
        return logits_UV, None, None, None, None


def _blocks(logits_UV: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows, each with a float32 copy of its logits over the temperature."""
    most = BLOCK_LOGITS if logits_UV.device.type == "cpu" else BLOCK_LOGITS_OF_GPU
    count = max(1, most // max(1, logits_UV.shape[1]))
    for start in range(0, len(logits_UV), count):
        rows = slice(start, start + count)
        x_UV = logits_UV[rows].to(torch.float32, copy=True)
        yield rows, x_UV if temperature == 1.0 else x_UV.div_(temperature)
