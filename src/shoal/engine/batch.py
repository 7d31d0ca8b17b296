"""Tensors of one step, assembled from a plan: input tokens, their attention, and the rows that sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from shoal.engine.attention import CachedRows, ChunkRows, DecodeRows
from shoal.engine.forward import Forward
from shoal.engine.kv_cache import KVCache, Pool
from shoal.engine.request import Draft
from shoal.engine.sampling import SamplingRows
from shoal.engine.scheduler import Chunk, StepPlan

LIKE_LENGTH = 0.75
"""Share of the longest chunk's length that every chunk of one attention call must reach."""


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
        draft.whole = len(draft.scores) < len(draft.targets)


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
        token_T = [draft.token_at(draft.total - 1) for draft in decoding]
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
        self._decode = _decode_rows(placed, device)
        self.layout = CachedRows([*self._decode, *(_chunk_rows(members, cache, device) for members in together)])
        self.keep_K = torch.tensor(keep or [len(token_T) - 1], device=device) if chunks else None
        own_rows = len(expand) == len(keep) and not self.scored
        self.expand = None if own_rows else torch.tensor(expand, dtype=torch.long, device=device)
        self.sampling = SamplingRows([draft.sampling for draft in self.drafts], device) if self.drafts else None
        self.truncates = any(draft.truncates for draft in self.drafts)
        self.seeded = any(draft.uniforms is not None for draft in self.drafts)

    def logits(self, forward: Forward) -> Tensor:
        """Logits [K, V] of the kept rows."""
        return forward(self.token_T, self.position_T, self.layout, self.keep_K)

    def advance(self, token_B: Tensor) -> bool:
        """Turns the batch into the next step's, in which every draft decodes. Returns False when a slot is full."""
        assert not self.scored, "only prefilling scores"
        self._room -= 1
        for rows in self._decode:
            rows.advance()
        self.token_T = token_B
        self.position_T += 1
        return self._room >= 0


def _decode_rows(placed: Sequence[tuple[Pool, int, Draft]], device: torch.device) -> list[DecodeRows]:
    """One `DecodeRows` per pool in use, for drafts sorted by pool."""
    rows = []
    for pool, members in groupby(placed, key=lambda p: p[0]):
        held = list(members)
        rows.append(DecodeRows(pool, [slot for _, slot, _ in held], [d.total - 1 for _, _, d in held], device))
    return rows


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
