"""Causal attention of rows of equal length over themselves, for training."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LONGEST_BY_HAND = 512
"""Tokens of a row up to which probabilities are kept on a CPU. With 9 heads of width 64, 8 rows of 95 tokens and
bfloat16, both passes take 5 ms so and 19 ms with torch's flash attention (one core)."""
MOST_SCORES = 1 << 24
"""Scores computed at a time where scores are capped or heads have sinks: 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Rule of a layer: the keys that a query sees, and how their products become probabilities."""

    scaling: float
    window: int | None = None
    """Tokens back, itself included, that a token may see; None means all."""
    chunk: int | None = None
    """Tokens of a chunk of positions; a token sees its own chunk only (Llama 4). None means one chunk."""
    cap: float | None = None
    """Bound of the scores: cap * tanh(score / cap) takes their place (Gemma 2, arXiv 2408.00118). None bounds none."""
    sinks_H: Tensor | None = field(default=None, compare=False)
    """Score of each head's sink, which has no key and no value (`by_definition`)."""

    @property
    def is_plain(self) -> bool:
        """Whether probabilities are a softmax of the scores."""
        return self.cap is None and self.sinks_H is None

    @property
    def hides(self) -> "Scores":
        """Rule of the keys alone, by which masks are kept."""
        return Scores(1.0, self.window, self.chunk)

    def all_seen(self, length: int) -> bool:
        """Whether no token of the first `length` is too far back for another."""
        return (self.window is None or self.window >= length) and (self.chunk is None or self.chunk >= length)

    def seen(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether queries see keys, by their positions."""
        distance = query - key
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        if self.chunk is not None:
            seen &= query // self.chunk == key // self.chunk
        return seen


def attended(q_RLHD: Tensor, k_RLKD: Tensor, v_RLKD: Tensor, scores: Scores) -> Tensor:
    """Attention of H query heads over K key-value heads: [R, L, H, D], with the width D of the values.

    Under autocast its products have autocast's dtype. Short rows on a CPU may lack the queries of their first tokens.
    """
    device, length = q_RLHD.device, k_RLKD.shape[1]
    if not scores.is_plain:
        q, k, v = (x.transpose(1, 2) for x in (q_RLHD, k_RLKD, v_RLKD))
        mask_LL = _seen(length, scores, device)
        return by_definition(q, k, v, mask_LL[-q_RLHD.shape[1] :], scores).transpose(1, 2)
    if device.type == "cpu" and length <= LONGEST_BY_HAND:
        if torch.is_autocast_enabled("cpu"):
            q_RLHD, k_RLKD, v_RLKD = (x.to(torch.get_autocast_dtype("cpu")) for x in (q_RLHD, k_RLKD, v_RLKD))
        hidden_QL = _hidden(length, scores, length - q_RLHD.shape[1])
        result: Tensor = _Attended.apply(  # type: ignore[no-untyped-call]
            q_RLHD, k_RLKD, v_RLKD, scores.scaling, hidden_QL
        )
        return result
    assert q_RLHD.shape[1] == length
    causal = scores.all_seen(length)
    q_RHLD, k_RKLD, v_RKLD = (x.transpose(1, 2) for x in (q_RLHD, k_RLKD, v_RLKD))
    out_RHLD = F.scaled_dot_product_attention(
        q_RHLD,
        k_RKLD,
        v_RKLD,
        attn_mask=None if causal else _seen(length, scores, device),
        is_causal=causal,
        scale=scores.scaling,
        enable_gqa=q_RHLD.shape[1] != k_RKLD.shape[1],
    )
    return out_RHLD.transpose(1, 2)


def by_definition(q_RHQD: Tensor, k_RKLD: Tensor, v_RKLD: Tensor, visible: Tensor, scores: Scores) -> Tensor:
    """Attention [R, H, Q, D] with capped scores, or with a sink in each head: a score that has no key and no value.

        p = exp(s_l) / (exp(sink) + sum_l exp(s_l))

    So with sinks the probabilities of a query sum to less than 1. `visible` is a boolean mask that broadcasts to
    [R, 1, Q, L]. Queries are computed in blocks of `MOST_SCORES`, and again in the backward pass. Source of sinks:
    GPT-OSS (arXiv 2508.10925).
    """
    heads, length = q_RHQD.shape[1], k_RKLD.shape[2]
    k_RHDL = k_RKLD.repeat_interleave(heads // k_RKLD.shape[1], 1).transpose(2, 3)
    v_RHLD = v_RKLD.repeat_interleave(heads // v_RKLD.shape[1], 1)

    def block(q_RHQD: Tensor, visible: Tensor) -> Tensor:
        score_RHQL = (q_RHQD @ k_RHDL).float().mul(scores.scaling)
        if scores.cap is not None:
            score_RHQL = torch.tanh(score_RHQL / scores.cap) * scores.cap
        score_RHQL = score_RHQL.masked_fill(~visible, -torch.inf)
        if scores.sinks_H is None:
            return score_RHQL.softmax(-1).to(v_RHLD.dtype) @ v_RHLD
        sink_RHQ1 = scores.sinks_H.float().view(1, heads, 1, 1).expand(*score_RHQL.shape[:3], 1)
        p_RHQL = torch.cat((score_RHQL, sink_RHQ1), -1).softmax(-1)[..., :-1]
        return p_RHQL.to(v_RHLD.dtype) @ v_RHLD

    count = max(1, MOST_SCORES // (len(q_RHQD) * heads * length))
    blocks = list(zip(torch.split(q_RHQD, count, 2), torch.split(visible, count, -2), strict=True))
    if len(blocks) == 1:
        return block(q_RHQD, visible)
    return torch.cat([checkpoint(block, *one, use_reentrant=False, preserve_rng_state=False) for one in blocks], 2)


def _seen(length: int, scores: Scores, device: torch.device | None = None) -> Tensor:
    """Mask [L, L], true on visible positions."""
    at_L = torch.arange(length, device=device)
    return scores.seen(at_L[:, None], at_L)


def _hidden(length: int, scores: Scores, skipped: int) -> Tensor:
    """Additions [Q, L] to scores: -inf where a key is hidden from one of the queries after the skipped, else 0."""
    all_LL = torch.full((length, length), -torch.inf)
    if scores.all_seen(length):
        return all_LL.triu(1)[skipped:]
    return all_LL.masked_fill(_seen(length, scores), 0)[skipped:]


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_RLHD: Tensor, k_RLKD: Tensor, v_RLKD: Tensor, scaling: float, hidden_QL: Tensor) -> Tensor:
        ctx.scaling, ctx.shapes = scaling, (q_RLHD.shape, k_RLKD.shape, v_RLKD.shape)
        with torch.autocast("cpu", enabled=False):
            result, kept = _forward(q_RLHD, k_RLKD, v_RLKD, scaling, hidden_QL)
        ctx.save_for_backward(*kept)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RLHD: Tensor) -> tuple[Tensor | None, ...]:
        kv_heads = ctx.shapes[1][2]
        grads = _backward(grad_RLHD, ctx.saved_tensors, ctx.scaling, kv_heads)
        return *(_rows(grad, shape, kv_heads) for grad, shape in zip(grads, ctx.shapes, strict=True)), None, None


def _forward(
    q_RLHD: Tensor, k_RLKD: Tensor, v_RLKD: Tensor, scaling: float, hidden_QL: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Products of whole rows, with scores and their softmax in float32; also what the gradient needs.

    Query heads of one key-value head lie end to end, as one matrix: X = R * K matrices, M = H / K * L queries each.
    """
    kv_heads = k_RLKD.shape[2]
    q_XMD, k_XLD, v_XLD = (_matrices(x, kv_heads) for x in (q_RLHD, k_RLKD, v_RLKD))
    groups = q_RLHD.shape[2] // kv_heads
    hidden_ML = hidden_QL.repeat(groups, 1)
    with _exact_products(q_XMD.dtype):
        score_XML = torch.baddbmm(hidden_ML, q_XMD.float(), k_XLD.float().transpose(1, 2), alpha=scaling)
        p_XML = score_XML.softmax(-1).to(q_XMD.dtype)
        out_XMD = torch.bmm(p_XML, v_XLD)
    shape = torch.Size((*q_RLHD.shape[:3], v_RLKD.shape[3]))
    return _rows(out_XMD, shape, kv_heads), (q_XMD, k_XLD, v_XLD, p_XML)


def _backward(
    grad_RLHD: Tensor, kept: tuple[Tensor, ...], scaling: float, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, as matrices."""
    q_XMD, k_XLD, v_XLD, p_XML = kept
    grad_XMD = _matrices(grad_RLHD, kv_heads)
    grad_v_XLD = torch.bmm(p_XML.transpose(1, 2), grad_XMD)
    grad_p_XML = torch.bmm(grad_XMD, v_XLD.transpose(1, 2))
    grad_score_XML = torch.ops.aten._softmax_backward_data(grad_p_XML, p_XML, -1, p_XML.dtype)
    grad_q_XMD = torch.baddbmm(q_XMD, grad_score_XML, k_XLD, beta=0, alpha=scaling)
    grad_k_XLD = torch.baddbmm(k_XLD, grad_score_XML.transpose(1, 2), q_XMD, beta=0, alpha=scaling)
    return grad_q_XMD, grad_k_XLD, grad_v_XLD


@contextmanager
def _exact_products(dtype: torch.dtype) -> Iterator[None]:
    """Has the processor multiply float32 copies of bfloat16 numbers as bfloat16, where it can.

    That loses nothing: such copies are not rounded, and sums and results stay float32. Scores take a third of the time.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if dtype is torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _matrices(x_RLHD: Tensor, kv_heads: int) -> Tensor:
    """Heads of each key-value head as one matrix: [R * K, H / K * L, D]."""
    rows, length, heads, width = x_RLHD.shape
    split = x_RLHD.reshape(rows, length, kv_heads, heads // kv_heads, width)
    return split.permute(0, 2, 3, 1, 4).reshape(rows * kv_heads, -1, width)


def _rows(x_XMD: Tensor, shape: torch.Size, kv_heads: int) -> Tensor:
    """Inverse of `_matrices`, for rows of a `shape` [R, L, H, D]."""
    rows, length, heads, width = shape
    split = x_XMD.view(rows, kv_heads, heads // kv_heads, length, width)
    return split.permute(0, 3, 1, 2, 4).reshape(shape)
