"""Attention of one step's tokens over the KV cache: the engine's `shoal.model.mixers.Layout`."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.engine.compute.kv_cache import Pool
from shoal.engine.compute.states import MixedRows
from shoal.model.attention import Scores, by_definition

MATRICES_BY_HAND = 16
"""Matrices of keys from which a decoding step in bfloat16 attends by two products on a CPU. With 32 rows of 96 tokens,
3 matrices each, that takes 0.17 ms a layer, and torch's flash attention 0.41 ms; with 2 rows it takes longer."""
ALL_SEEN = Scores(1.0)


def _by_hand(k_SKCD: Tensor, longest: int) -> bool:
    """Whether two products over the whole storage are faster than flash attention over the longest row."""
    rows, heads, capacity, _ = k_SKCD.shape
    slow = k_SKCD.device.type == "cpu" and k_SKCD.dtype is torch.bfloat16
    return slow and rows * heads >= MATRICES_BY_HAND and capacity <= 2 * longest


class DecodeRows:
    """Decoding rows of one forward: one token for each sequence of one pool.

    While the rows are in use no sequence may enter or leave the pool, so views of its storage stay valid.
    """

    def __init__(self, pool: Pool, slots: Sequence[int], positions: Sequence[int], device: torch.device) -> None:
        self.count = len(slots)
        self.longest = max(positions) + 1
        self._pool = pool
        self._uniform = min(positions) == max(positions)
        self._span = max(slots) + 1
        self._dense = list(slots) == list(range(len(slots)))
        self._slot_N = torch.tensor(slots, device=device)
        self._position_N = torch.tensor(positions, device=device)
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # K and V of [span, K, capacity, D] by layer
        self._row_by_heads: dict[int, Tensor] = {}  # flat row of each (token, head) in [S * K * capacity, D]
        self._mask_by_rule: dict[Scores, Tensor] = {}

    def advance(self) -> None:
        """Moves each row to the next token of its sequence."""
        self.longest += 1
        self._position_N += 1
        self._mask_by_rule.clear()
        for row_NK in self._row_by_heads.values():
            row_NK.add_(1)

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scores: Scores) -> Tensor:
        """Stores the new keys and values, then attends over each sequence: [N, H, D]."""
        views = self._views.get(layer)
        if views is None:
            k, v = self._pool.layer(layer, key_NKD, value_NKD)
            views = self._views[layer] = k[: self._span], v[: self._span]
        k_SKCD, v_SKCD = views
        self._store(k_SKCD, key_NKD)
        self._store(v_SKCD, value_NKD)
        q_NKGD = query_NHD.view(self.count, key_NKD.shape[1], -1, query_NHD.shape[2])
        if not self._dense:
            q_NKGD = q_NKGD.new_zeros((self._span, *q_NKGD.shape[1:])).index_copy_(0, self._slot_N, q_NKGD)
        if not scores.is_plain:
            q_SHQD, seen = q_NKGD.flatten(1, 2)[:, :, None], self._mask(scores, torch.float32, self.longest) == 0
            k_SKLD, v_SKLD = (x.narrow(2, 0, self.longest) for x in views)
            out_NKGD = by_definition(q_SHQD, k_SKLD, v_SKLD, seen, scores)
        elif _by_hand(k_SKCD, self.longest):
            # Storage that no token has written to is zero; its probability is too.
            score_NKGC = torch.matmul(q_NKGD, k_SKCD.transpose(2, 3)).float().mul_(scores.scaling)
            p_NKGC = score_NKGC.add_(self._mask(scores, torch.float32, k_SKCD.shape[2])).softmax(-1)
            out_NKGD = torch.matmul(p_NKGC.to(q_NKGD.dtype), v_SKCD)
        else:
            free = self._uniform and self._dense and scores.all_seen(self.longest)
            out_NKGD = F.scaled_dot_product_attention(
                q_NKGD,
                k_SKCD.narrow(2, 0, self.longest),
                v_SKCD.narrow(2, 0, self.longest),
                attn_mask=None if free else self._mask(scores, query_NHD.dtype, self.longest),
                scale=scores.scaling,
            )
        if not self._dense:
            out_NKGD = out_NKGD.index_select(0, self._slot_N)
        return out_NKGD.flatten(1, 2)

    def _store(self, stored_SKCD: Tensor, new_NKD: Tensor) -> None:
        if self._uniform and self._dense:
            stored_SKCD.select(2, self.longest - 1).copy_(new_NKD)
        else:
            store(stored_SKCD, new_NKD, self._slot_N, self._position_N, self._row_by_heads)

    def _mask(self, scores: Scores, dtype: torch.dtype, length: int) -> Tensor:
        """Additive mask [S, 1, 1, length]: 0 on visible positions, -inf elsewhere."""
        rule = ALL_SEEN if scores.all_seen(self.longest) else scores.hides
        if rule not in self._mask_by_rule:
            position_S = self._position_N
            if not self._dense:  # holes attend to their first token: a row without a visible token would be NaN
                position_S = position_S.new_zeros(self._span).index_copy_(0, self._slot_N, position_S)
            at_L = torch.arange(length, device=position_S.device)
            hidden_SL = ~rule.seen(position_S[:, None], at_L)
            seen_SL = torch.zeros(hidden_SL.shape, dtype=dtype, device=position_S.device)
            self._mask_by_rule[rule] = seen_SL.masked_fill_(hidden_SL, -torch.inf)[:, None, None, :]
        return self._mask_by_rule[rule]


class ChunkRows:
    """Prefill rows of one forward: chunks of known tokens of sequences in one pool.

    Either all chunks start at 0 or none does.

    Chunks attend together, padded to the longest. Padding follows the real tokens of a chunk, so chunks that start at 0
    attend to each other's rows causally without a mask. Other chunks attend to stored keys and values.
    """

    def __init__(
        self, pool: Pool, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> None:
        self.count = sum(lengths)
        self._pool = pool
        self._chunks, self._padded = len(slots), max(lengths)
        self._from_zero = not any(starts)
        self._end = max(start + length for start, length in zip(starts, lengths, strict=True))
        self._slot_R = torch.tensor(slots, device=device)
        self._start_R = torch.tensor(starts, device=device)
        length_R = torch.tensor(lengths, device=device)
        self._slot_N = self._slot_R.repeat_interleave(length_R)
        at_RL = torch.arange(self._padded, device=device).expand(self._chunks, -1)
        real_RL = at_RL < length_R[:, None]
        self._position_N = (at_RL + self._start_R[:, None])[real_RL]
        self._real = self._source = None  # indices from padded rows to real rows, and back
        if self.count < self._chunks * self._padded:
            self._real = real_RL.flatten().nonzero()[:, 0]
            self._source = (real_RL.flatten().cumsum(0) - 1).clamp_(min=0)
        self._row_by_heads: dict[int, Tensor] = {}
        self._mask_by_rule: dict[Scores, Tensor] = {}

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scores: Scores) -> Tensor:
        """Stores the new keys and values, then attends to all earlier tokens: [N, H, D]."""
        k_SKCD, v_SKCD = self._pool.layer(layer, key_NKD, value_NKD)
        for stored_SKCD, new_NKD in ((k_SKCD, key_NKD), (v_SKCD, value_NKD)):
            store(stored_SKCD, new_NKD, self._slot_N, self._position_N, self._row_by_heads)
        q_RHLD = self._by_chunk(query_NHD)
        if self._from_zero:
            k_RKLD, v_RKLD = self._by_chunk(key_NKD), self._by_chunk(value_NKD)
        else:
            k_RKLD, v_RKLD = (x.narrow(2, 0, self._end).index_select(0, self._slot_R) for x in (k_SKCD, v_SKCD))
        causal = self._from_zero and scores.all_seen(self._end)
        if not scores.is_plain:
            out_RHLD = by_definition(q_RHLD, k_RKLD, v_RKLD, self._mask(scores), scores)
        else:
            out_RHLD = F.scaled_dot_product_attention(
                q_RHLD,
                k_RKLD,
                v_RKLD,
                attn_mask=None if causal else self._mask(scores),
                is_causal=causal,
                scale=scores.scaling,
                enable_gqa=query_NHD.shape[1] != key_NKD.shape[1],
            )
        out_NHD = out_RHLD.transpose(1, 2).flatten(0, 1)
        return out_NHD if self._real is None else out_NHD.index_select(0, self._real)

    def _by_chunk(self, x_NHD: Tensor) -> Tensor:
        """Rows by chunk, padded: [chunks, H, padded, D]."""
        x = x_NHD if self._source is None else x_NHD.index_select(0, self._source)
        return x.view(self._chunks, self._padded, *x.shape[1:]).transpose(1, 2)

    def _mask(self, scores: Scores) -> Tensor:
        """Boolean mask [chunks, 1, padded, end]: true on visible positions."""
        rule = ALL_SEEN if scores.all_seen(self._end) else scores.hides
        mask = self._mask_by_rule.get(rule)
        if mask is None:
            device = self._slot_R.device
            at_RL1 = (self._start_R[:, None] + torch.arange(self._padded, device=device))[:, :, None]
            # Padding far behind may see no token; its output is dropped.
            visible = rule.seen(at_RL1, torch.arange(self._end, device=device))
            mask = self._mask_by_rule[rule] = visible[:, None]
        return mask


class CachedRows:
    """Layout of one step: decoding rows first, pool by pool, then chunks."""

    def __init__(self, parts: Sequence[DecodeRows | ChunkRows], mixed: MixedRows) -> None:
        self._parts = parts
        self.mix = mixed.mix

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scores: Scores) -> Tensor:
        """Attends with every part over its own rows: [T, H, D]."""
        if len(self._parts) == 1:
            return self._parts[0].attend(layer, query_THD, key_TKD, value_TKD, scores)
        outs, start = [], 0
        for part in self._parts:
            end = start + part.count
            q, k, v = query_THD[start:end], key_TKD[start:end], value_TKD[start:end]
            outs.append(part.attend(layer, q, k, v, scores))
            start = end
        return torch.cat(outs)


def store(
    stored_SKCD: Tensor, new_NKD: Tensor, slot_N: Tensor, position_N: Tensor, row_by_heads: dict[int, Tensor]
) -> None:
    """Writes the vector of each (token, head) to its slot and position.

    `row_by_heads` keeps the indices [N * K] of these vectors in storage viewed as [S * K * capacity, D].
    """
    _, heads, capacity, width = stored_SKCD.shape
    row_NK = row_by_heads.get(heads)
    if row_NK is None:
        head_K = torch.arange(heads, device=slot_N.device)
        row_NK = ((slot_N[:, None] * heads + head_K) * capacity + position_N[:, None]).flatten()
        row_by_heads[heads] = row_NK
    stored_SKCD.view(-1, width).index_copy_(0, row_NK, new_NKD.reshape(-1, width))
