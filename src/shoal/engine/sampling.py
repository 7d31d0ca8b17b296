"""Sampling of tokens from logits, with the probability of each sampled token.

A row's distribution comes from these steps, in order. Logits are divided by the temperature. Only the `top_k` most
likely tokens stay, renormalised. Then only the smallest set of most likely tokens whose probability reaches `top_p`
stays, renormalised. Then only tokens with at least `min_p` times the probability of the most likely token stay,
renormalised. The logprob of a token (nats) is its logprob under that distribution.

A greedy row (temperature 0) takes the most likely token. Its logprob is computed at temperature 1 without truncation,
because the greedy distribution is a certainty.

One uniform number decides each token (inverse transform), so a row samples the same token whatever else is in the
batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.types import Sampling

CANDIDATES = 256  # nearly all truncated rows keep fewer tokens than this, and then need no full sort
UNIFORM_BLOCK = 64
OFF = 2**31  # top_k of rows without a limit


class Uniforms:
    """Uniform numbers of one completion: number i decides token i. Equal (seed, index) give equal numbers.

    The Philox key is (seed, index of the completion in its request), so no two completions share a stream.
    """

    __slots__ = ("_generator", "_known")

    def __init__(self, seed: int, index: int) -> None:
        key = np.array([seed % 2**64, index], dtype=np.uint64)
        self._generator = np.random.Generator(np.random.Philox(key=key))
        self._known: list[float] = []

    def __getitem__(self, i: int) -> float:
        while i >= len(self._known):
            self._known += self._generator.random(UNIFORM_BLOCK, dtype=np.float32).tolist()
        return self._known[i]


class SamplingRows:
    """Sampling parameters of B rows as tensors; columns are [B, 1], or [1, 1] where all rows agree."""

    def __init__(self, rows: Sequence[Sampling], device: torch.device | str = "cpu") -> None:
        if len({(s.temperature, s.top_p, s.top_k, s.min_p) for s in rows}) == 1:
            rows = rows[:1]
        greedy = [s.temperature == 0 for s in rows]
        truncating = [i for i, s in enumerate(rows) if s.temperature > 0 and (s.top_p < 1 or s.top_k or s.min_p)]
        self.all_greedy = all(greedy)
        self.all_truncate = len(truncating) == len(rows)
        self.greedy_B = torch.tensor(greedy, device=device) if any(greedy) else None
        self.truncating_N = torch.tensor(truncating, device=device) if truncating else None
        self.temperature = None
        if any(s.temperature != 1 for s in rows):
            self.temperature = torch.tensor([s.temperature or 1.0 for s in rows], device=device)[:, None]
        cut = [rows[i] for i in truncating]
        self.top_p = torch.tensor([s.top_p for s in cut], device=device)[:, None]
        self.top_k = torch.tensor([s.top_k or OFF for s in cut], device=device)[:, None]
        self.min_p = torch.tensor([s.min_p for s in cut], device=device)[:, None]


def sample(logits_BV: Tensor, rows: SamplingRows, uniform_B: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Samples a token per row; returns tokens, their logprobs (nats, float32) and the log of the kept mass.

    `uniform_B` in [0, 1) decides. The kept mass is the part of the distribution at the row's temperature that top-k,
    top-p and min-p keep. A logprob plus the log of the kept mass is the untruncated logprob. The third result is None
    when no row truncates.
    """
    logits_BV = logits_BV.float()
    if rows.all_greedy:
        return *_greedy(logits_BV), None
    scaled_BV = logits_BV if rows.temperature is None else logits_BV / rows.temperature
    if rows.all_truncate:
        return _truncated(scaled_BV, rows.top_p, rows.top_k, rows.min_p, uniform_B)
    token_B, logp_B = _whole(scaled_BV, uniform_B)
    log_kept_B = None
    if rows.truncating_N is not None:
        n = rows.truncating_N
        log_kept_B = torch.zeros_like(logp_B)
        token_B[n], logp_B[n], log_kept_B[n] = _truncated(
            scaled_BV[n], rows.top_p, rows.top_k, rows.min_p, uniform_B[n]
        )
    if rows.greedy_B is not None:
        best_token_B, best_B = _greedy(logits_BV)
        token_B = torch.where(rows.greedy_B, best_token_B, token_B)
        logp_B = torch.where(rows.greedy_B, best_B, logp_B)
    return token_B, logp_B, log_kept_B


def _greedy(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    logp_B, token_B = logits_BV.log_softmax(-1).max(-1)
    return token_B, logp_B


def _whole(scaled_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Samples from the whole vocabulary."""
    p_BV = scaled_BV.softmax(-1)
    token_B1 = _inverse_transform(p_BV, uniform_B)
    return token_B1[:, 0], p_BV.gather(-1, token_B1)[:, 0].log().clamp_(max=0.0)


def _inverse_transform(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Indices [B, 1] where the cumulative sum first exceeds u times the sum; an entry with p = 0 is never chosen."""
    cumulative_BV = p_BV.cumsum(-1)
    threshold_B1 = cumulative_BV[:, -1:] * uniform_B[:, None]
    return torch.searchsorted(cumulative_BV, threshold_B1, right=True).clamp_(max=p_BV.shape[-1] - 1)


def _truncated(
    scaled_BV: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, uniform_B: Tensor, candidates: int = CANDIDATES
) -> tuple[Tensor, Tensor, Tensor]:
    """Samples from each row's kept tokens, found among its `candidates` most likely tokens.

    Rows that may keep more tokens than the candidates are sampled again from the whole vocabulary. That decision
    depends on the row alone.
    """
    candidates = min(candidates, scaled_BV.shape[-1])
    total_B1 = scaled_BV.logsumexp(-1, keepdim=True)
    top_BC, id_BC = scaled_BV.topk(candidates, dim=-1)
    kept_BC = _kept((top_BC - total_B1).exp(), top_p, top_k, min_p)
    masked_BC = top_BC.masked_fill(~kept_BC, -torch.inf)
    log_kept_B = (masked_BC.logsumexp(-1, keepdim=True) - total_B1)[:, 0].clamp_(max=0.0)
    logp_BC = masked_BC.log_softmax(-1)
    choice_B1 = _inverse_transform(logp_BC.exp(), uniform_B)
    token_B, logp_B = id_BC.gather(-1, choice_B1)[:, 0], logp_BC.gather(-1, choice_B1)[:, 0].clamp_(max=0.0)
    if candidates < scaled_BV.shape[-1]:
        short_B = kept_BC[:, -1] | ((top_k > candidates) & (top_k < OFF))[:, 0]
        if bool(short_B.any()):
            p, k, m = (column.expand(len(token_B), 1)[short_B] for column in (top_p, top_k, min_p))
            again = _truncated(scaled_BV[short_B], p, k, m, uniform_B[short_B], candidates=scaled_BV.shape[-1])
            token_B[short_B], logp_B[short_B], log_kept_B[short_B] = again
    return token_B, logp_B, log_kept_B


def _kept(p_BC: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Mask [B, C] of the tokens, sorted by falling probability of the whole distribution, that may be sampled.

    Every condition keeps a prefix of the row and always its first token.
    """
    in_top_k_BC = torch.arange(p_BC.shape[-1], device=p_BC.device) < top_k
    mass_B1 = torch.where(top_k < OFF, (p_BC * in_top_k_BC).sum(-1, keepdim=True), 1.0)
    in_top_p_BC = (top_p >= 1) | (p_BC.cumsum(-1) - p_BC < top_p * mass_B1)
    kept_BC = in_top_k_BC & in_top_p_BC & (p_BC >= min_p * p_BC[:, :1])
    kept_BC[:, 0] = True
    return kept_BC
