"""Batch of one step: the rows of its forward, and the tokens sampled from their logits, with their probabilities.

A row's distribution comes from these steps, in order. Logits are divided by the temperature. Only the `top_k` most
likely tokens stay, renormalised. Then only the smallest set of most likely tokens whose probability reaches `top_p`
stays, renormalised. Then only tokens with at least `min_p` times the probability of the most likely token stay,
renormalised. The logprob of a token (nats) is its logprob under that distribution.

A greedy row (temperature 0) takes the most likely token. Its logprob is computed at temperature 1 without truncation,
because the greedy distribution is a certainty.

One uniform number decides each token (inverse transform), so a row samples the same token in any
batch.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.engine.compute.adapters import AdaptedRows
from shoal.engine.compute.attention import CachedRows, ChunkRows, DecodeRows
from shoal.engine.compute.kv_cache import KVCache
from shoal.engine.compute.logit_rules import LEAST_SHARE, reported
from shoal.engine.compute.request import NOT_FINITE, Draft
from shoal.engine.compute.scheduler import Chunk, StepPlan
from shoal.engine.compute.states import MixedRows
from shoal.types import Sampling

if TYPE_CHECKING:
    from shoal.engine.compute.forward import Forward

CANDIDATES = 256  # nearly all truncated rows keep fewer tokens than this, and then need no full sort
OFF = 2**31  # top_k of rows without a limit
BLOCK = 256
"""Entries of a distribution per block of sums in the search for the sampled one."""
LIKE_LENGTH = 0.75
"""Share of the longest chunk's length that every chunk of one attention call must reach."""


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
        self.kept: list[list[int]] | None = [] if any(one.records_kept for one in cut) else None
        """Tokens that could be sampled in each row of the newest `sample`, where wanted; none in a row of them all."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Kept rows `row : row + count`, which score the tokens of `draft` after its positions from `start` on."""

    draft: Draft
    row: int
    start: int
    count: int

    def note(self, logits_KV: Tensor) -> None:
        """Writes the logprobs of these tokens into the draft."""
        draft, logits_NV = self.draft, logits_KV[self.row : self.row + self.count].float()
        targets = draft.targets[self.start : self.start + self.count]
        target_N1 = torch.tensor(targets, device=logits_NV.device)[:, None]
        logp_N = logits_NV.gather(-1, target_N1)[:, 0] - logits_NV.logsumexp(-1)
        # A chunk computed again after an interruption replaces its scores.
        draft.scores[self.start :] = logp_N.clamp_(max=0.0).tolist()
        if draft.others:
            draft.ranked[self.start :] = self._ranked(logits_NV.log_softmax(-1))
        draft.whole = len(draft.scores) < len(draft.targets)
        draft.failed = "" if all(map(math.isfinite, draft.scores)) else NOT_FINITE

    def _ranked(self, logp_NV: Tensor) -> list[list[tuple[int, float]]]:
        """Tokens that the draft wants scored in place of each target, with their logprobs."""
        wanted = self.draft.others
        if isinstance(wanted, int):
            top_NK, id_NK = logp_NV.topk(min(wanted, logp_NV.shape[-1]))
            rows = zip(id_NK.tolist(), top_NK.tolist(), strict=True)
            return [list(zip(ids, logps, strict=True)) for ids, logps in rows]
        listed = wanted[self.start : self.start + self.count]
        return [[(i, float(logp_V[i])) for i in ids] for ids, logp_V in zip(listed, logp_NV, strict=True)]


class StepBatch:
    """One forward: decoding rows first, pool by pool, then chunks of known tokens.

    Each of the `drafts` [B] samples a token. `keep_K` selects the positions, out of T, that pass through the
    language-model head; None selects all. `expand` [B] names the kept row from which each draft samples; None means its
    own row.
    """

    def __init__(self, plan: StepPlan[Draft], cache: KVCache, device: torch.device) -> None:
        """Requires that the cache has placed all sequences of the plan and made the copies that the plan orders."""
        self.plan = plan
        placed = sorted(((*cache.place(draft), draft) for draft in plan.decode), key=lambda p: (p[0].capacity, p[1]))
        decoding = [draft for _, _, draft in placed]
        together = _chunks_together(plan.chunks, cache)
        chunks = [chunk for members in together for chunk in members]
        self.drafts: list[Draft] = decoding
        self.scored: list[ScoredRows] = []
        self.decoding = decoding
        self.chunks = chunks
        token_T = [(draft.sampled or draft.prompt_ids)[-1] for draft in decoding]
        position_T = [draft.total - 1 for draft in decoding]
        keep, expand = list(range(len(decoding))), list(range(len(decoding)))
        for chunk in chunks:
            token_T += chunk.sequence.tokens(chunk.start, chunk.start + chunk.length)
            position_T += range(chunk.start, chunk.start + chunk.length)
            first = len(token_T) - chunk.length
            wanted = max(0, min(chunk.length, len(chunk.sequence.targets) - chunk.start))
            if wanted:
                self.scored.append(ScoredRows(chunk.sequence, len(keep), chunk.start, wanted))
                keep += range(first, first + wanted)
            if chunk.completes:
                self.drafts = [*self.drafts, chunk.sequence, *chunk.followers]
                if wanted < chunk.length:
                    keep.append(len(token_T) - 1)
                expand += [len(keep) - 1] * (1 + len(chunk.followers))
        self.token_T = torch.tensor(token_T, device=device)
        self.position_T = torch.tensor(position_T, device=device)
        self._room = min((pool.capacity - draft.total for pool, _, draft in placed), default=0)
        self._decode = [
            DecodeRows(pool, [slot for _, slot, _ in members], [d.total - 1 for *_, d in members], device)
            for pool, members in ((pool, list(group)) for pool, group in groupby(placed, key=lambda p: p[0]))
        ]
        self.layout = CachedRows(
            [*self._decode, *(_chunk_rows(members, cache, device) for members in together)],
            MixedRows(cache.states, decoding, [(chunk.sequence, chunk.start, chunk.length) for chunk in chunks]),
        )
        self.keep_K = torch.tensor(keep or [len(token_T) - 1], device=device) if chunks else None
        adapters_T = [draft.adapter for draft in decoding]
        for chunk in chunks:
            adapters_T += [chunk.sequence.adapter] * chunk.length
        self._adapted = AdaptedRows(adapters_T, self.keep_K, device) if any(adapters_T) else None
        own_rows = len(expand) == len(keep) and not self.scored
        self.expand = None if own_rows else torch.tensor(expand, dtype=torch.long, device=device)
        self.sampling = SamplingRows([draft.sampling for draft in self.drafts], device) if self.drafts else None
        self.seeded = any(draft.uniforms is not None for draft in self.drafts)
        self._ruled = [(row, d, d.rules) for row, d in enumerate(self.drafts) if d.rules is not None and d.max_sampled]

    def ruled(self, logits_BV: Tensor) -> Tensor:
        """Logits [B, V] to sample from: those of the model, but for rows with rules."""
        if not self._ruled:
            return logits_BV
        left_BV = logits_BV.float().clone()
        for row, draft, rules in self._ruled:
            left_BV[row] = rules.changed(left_BV[row], draft.sampling.temperature)
        return left_BV

    def note_ruled(self, logits_BV: Tensor, tokens: Sequence[int], logprobs: list[float]) -> None:
        """Adds the tokens to the rows with rules, and puts the model's own logprobs into rows that are not trained."""
        for row, draft, rules in self._ruled:
            if rules.is_trained:
                draft.forced += [len(draft.sampled)] if rules.share < LEAST_SHARE else []
            else:
                (logprobs[row],), (top,) = reported(logits_BV[row : row + 1], tokens[row : row + 1], rules.top)
                draft.tops.append(top)
            rules.note(tokens[row])

    def note_kept(self) -> None:
        """Writes the tokens that could be sampled into the drafts that record them."""
        kept = self.sampling.kept if self.sampling is not None else None
        for draft, ids in zip(self.drafts, kept or (), strict=False):
            if draft.sampling.records_kept and draft.max_sampled:
                draft.kept.append(array("I", ids).tobytes())

    def logits(self, forward: "Forward") -> Tensor:
        """Logits [K, V] of the kept rows."""
        forward.adapted = self._adapted
        return forward(self.token_T, self.position_T, self.layout, self.keep_K)

    def route(self, found_TE: Tensor) -> None:
        """Records the experts of each token of the forward in its draft."""
        experts = [bytes(row) for row in found_TE.cpu().numpy()]
        for draft, of_token in zip(self.decoding, experts, strict=False):
            draft.route(draft.total - 1, of_token)
        at = len(self.decoding)
        for chunk in self.chunks:
            for offset in range(chunk.length):
                chunk.sequence.route(chunk.start + offset, experts[at + offset])
            at += chunk.length
            for follower in chunk.followers:
                follower.routing = chunk.sequence.routing[: follower.prompt_len]

    def advance(self, token_B: Tensor) -> bool:
        """Turns the batch into the next step's, in which every draft decodes. Returns False when a slot is full."""
        assert not self.scored, "only prefilling scores"
        self._room -= 1
        for rows in self._decode:
            rows.advance()
        self.token_T = token_B
        self.position_T += 1
        return self._room >= 0


def _chunks_together(chunks: Sequence[Chunk[Draft]], cache: KVCache) -> list[list[Chunk[Draft]]]:
    """Chunks by attention call: of one pool, of similar length, and either all starting at 0 or none."""

    def kind(chunk: Chunk[Draft]) -> tuple[int, bool, int]:
        return cache.place(chunk.sequence)[0].capacity, chunk.start > 0, -chunk.length

    together: list[list[Chunk[Draft]]] = []
    for chunk in sorted(chunks, key=kind):
        first = together[-1][0] if together else None
        if first is not None and kind(chunk)[:2] == kind(first)[:2] and chunk.length >= LIKE_LENGTH * first.length:
            together[-1].append(chunk)
        else:
            together.append([chunk])
    return together


def _chunk_rows(chunks: Sequence[Chunk[Draft]], cache: KVCache, device: torch.device) -> ChunkRows:
    places = [cache.place(chunk.sequence) for chunk in chunks]
    starts, lengths = [chunk.start for chunk in chunks], [chunk.length for chunk in chunks]
    return ChunkRows(places[0][0], [slot for _, slot in places], starts, lengths, device)


def sample(logits_BV: Tensor, rows: SamplingRows, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Samples a token per row, as `uniform_B` in [0, 1) decides; returns tokens and their logprobs (nats, float32)."""
    logits_BV = logits_BV.float()
    if rows.all_greedy:
        return _greedy(logits_BV)
    scaled_BV = logits_BV if rows.temperature is None else logits_BV / rows.temperature
    kept: list[list[int]] | None = None if rows.kept is None else []
    if rows.all_truncate:
        token_B, logp_B = _truncated(scaled_BV, rows.top_p, rows.top_k, rows.min_p, uniform_B, kept=kept)
        rows.kept = kept
        return token_B, logp_B
    token_B, logp_B = _whole(scaled_BV, uniform_B)
    if rows.truncating_N is not None:
        n = rows.truncating_N
        token_B[n], logp_B[n] = _truncated(scaled_BV[n], rows.top_p, rows.top_k, rows.min_p, uniform_B[n], kept=kept)
        if kept is not None:
            of_row = dict(zip(n.tolist(), kept, strict=True))
            rows.kept = [of_row.get(row, []) for row in range(len(token_B))]
    if rows.greedy_B is not None:
        best_token_B, best_B = _greedy(logits_BV)
        token_B = torch.where(rows.greedy_B, best_token_B, token_B)
        logp_B = torch.where(rows.greedy_B, best_B, logp_B)
    return token_B, logp_B


def _greedy(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    logp_B, token_B = logits_BV.log_softmax(-1).max(-1)
    return token_B, logp_B


def _whole(scaled_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Samples from the whole vocabulary."""
    p_BV = scaled_BV.softmax(-1)
    token_B1 = _inverse_transform(p_BV, uniform_B)
    return token_B1[:, 0], p_BV.gather(-1, token_B1)[:, 0].log().clamp_(max=0.0)


def _inverse_transform(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Indices [B, 1] where the cumulative sum first exceeds u times the sum; an entry with p = 0 is never chosen.

    A row that is not finite gets any entry: an index past its end would end the step of all other rows.

    In a long vocabulary the block of entries is found first: a cumulative sum takes ten times as long as a sum.
    """
    if p_BV.shape[1] <= BLOCK:
        cumulative_BV = p_BV.cumsum(-1)
        return _first_above(cumulative_BV, cumulative_BV[:, -1:] * uniform_B[:, None])
    whole = p_BV.shape[1] // BLOCK * BLOCK
    blocks_BN = torch.cat((p_BV[:, :whole].view(len(p_BV), -1, BLOCK).sum(-1), p_BV[:, whole:].sum(-1, True)), 1)
    before_BN = blocks_BN.cumsum(-1)
    threshold_B1 = before_BN[:, -1:] * uniform_B[:, None]
    block_B1 = _first_above(before_BN, threshold_B1)
    threshold_B1 = (threshold_B1 - (before_BN - blocks_BN).gather(1, block_B1)).clamp_(min=0)
    entry_BC = block_B1 * BLOCK + torch.arange(BLOCK, device=p_BV.device)
    p_BC = p_BV.gather(1, entry_BC.clamp(max=p_BV.shape[1] - 1)).masked_fill_(entry_BC >= p_BV.shape[1], 0)
    return (block_B1 * BLOCK + _first_above(p_BC.cumsum(-1), threshold_B1)).clamp_(max=p_BV.shape[1] - 1)


def _first_above(cumulative_BN: Tensor, threshold_B1: Tensor) -> Tensor:
    """Indices [B, 1] of the first sum above the threshold, or of the first that reaches the last one."""
    last_B1 = torch.searchsorted(cumulative_BN, cumulative_BN[:, -1:].contiguous())
    last_B1.clamp_(max=cumulative_BN.shape[1] - 1)
    return torch.searchsorted(cumulative_BN, threshold_B1, right=True).minimum(last_B1)


def _truncated(
    scaled_BV: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    min_p: Tensor,
    uniform_B: Tensor,
    candidates: int = CANDIDATES,
    kept: list[list[int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Samples from each row's kept tokens, found among its `candidates` most likely tokens; adds these rows to `kept`.

    Rows that may keep more tokens than the candidates are sampled again from the whole vocabulary. That decision
    depends on the row alone.
    """
    candidates = min(candidates, scaled_BV.shape[-1])
    total_B1 = scaled_BV.logsumexp(-1, keepdim=True)
    top_BC, id_BC = scaled_BV.topk(candidates, dim=-1)
    kept_BC = _kept((top_BC - total_B1).exp(), top_p, top_k, min_p)
    logp_BC = top_BC.masked_fill(~kept_BC, -torch.inf).log_softmax(-1)
    choice_B1 = _inverse_transform(logp_BC.exp(), uniform_B)
    token_B, logp_B = id_BC.gather(-1, choice_B1)[:, 0], logp_BC.gather(-1, choice_B1)[:, 0].clamp_(max=0.0)
    if kept is not None:
        counts = kept_BC.sum(-1).tolist()  # a prefix of each row
        kept += [ids[:count] for ids, count in zip(id_BC[:, : max(counts)].tolist(), counts, strict=True)]
    if candidates < scaled_BV.shape[-1]:
        short_B = kept_BC[:, -1] | ((top_k > candidates) & (top_k < OFF))[:, 0]
        if bool(short_B.any()):
            p, k, m = (column.expand(len(token_B), 1)[short_B] for column in (top_p, top_k, min_p))
            found: list[list[int]] | None = None if kept is None else []
            whole = scaled_BV.shape[-1]
            again = _truncated(scaled_BV[short_B], p, k, m, uniform_B[short_B], candidates=whole, kept=found)
            token_B[short_B], logp_B[short_B] = again
            if kept is not None and found is not None:
                for row, ids in zip(short_B.nonzero()[:, 0].tolist(), found, strict=True):
                    kept[row] = ids
    return token_B, logp_B


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
