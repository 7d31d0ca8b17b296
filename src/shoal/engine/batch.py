"""The tensors of one step, assembled from a plan: what is fed, how it attends, and from which rows tokens are drawn."""

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
"""Chunks attend together, padded to the longest, when none is shorter than this share of it."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Kept rows `row : row + count` score the tokens of `draft` that follow its positions from `start` on."""

    draft: Draft
    row: int
    start: int
    count: int

    def note(self, logits_KV: Tensor) -> None:
        """Gives the draft the logprobs of those tokens."""
        draft, logits_NV = self.draft, logits_KV[self.row : self.row + self.count].float()
        targets = draft.targets[self.start : self.start + self.count]
        target_N1 = torch.tensor(targets, device=logits_NV.device)[:, None]
        logp_N = logits_NV.gather(-1, target_N1)[:, 0] - logits_NV.logsumexp(-1)
        # What an interruption has computed again replaces what was there.
        draft.scores[self.start :] = logp_N.clamp_(max=0.0).tolist()
        draft.whole = len(draft.scores) < len(draft.targets)


class StepBatch:
    """One forward: decoding rows first, pool by pool, then chunks of known tokens.

    `drafts` [B] draw a token each. `keep_K` says which of the T positions pass through the language-model head (None:
    all), and `expand` [B] which of the kept rows each draft draws from (None: its own).
    """

    def __init__(self, plan: StepPlan[Draft], cache: KVCache, device: torch.device) -> None:
        """All sequences of the plan are placed in the cache, and copies that it orders have been made."""
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
        """[K, V] of the kept rows."""
        return forward(self.token_T, self.position_T, self.layout, self.keep_K)

    def advanced(self, token_B: Tensor) -> bool:
        """Makes this the batch of the next step, in which every draft decodes; False when a slot is full."""
        assert not self.scored, "only prefilling scores"
        self._room -= 1
        for rows in self._decode:
            rows.advance()
        self.token_T = token_B
        self.position_T += 1
        return self._room >= 0


def _decode_rows(placed: Sequence[tuple[Pool, int, Draft]], device: torch.device) -> list[DecodeRows]:
    """One `DecodeRows` per pool in use, of drafts that are sorted by pool."""
    rows = []
    for pool, members in groupby(placed, key=lambda p: p[0]):
        held = list(members)
        rows.append(DecodeRows(pool, [slot for _, slot, _ in held], [d.total - 1 for _, _, d in held], device))
    return rows


def _chunks_together(chunks: Sequence[Chunk[Draft]], cache: KVCache) -> list[list[Chunk[Draft]]]:
    """Chunks that attend in one call: of one pool, that start at 0 or do not, of like length."""

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
