"""Forward pass from tokens to logits: transformers' modules, or the same products called directly.

A decode step of a small model has hundreds of operations of some microseconds each, and transformers' modules double
that time. For the Llama family `DirectForward` calls about 14 operations a layer. Linear layers with the same input
become one product, and a rotation becomes one complex product. The result is equal up to rounding (tested for each
architecture). Both use the same tensors, so weights load in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from shoal.engine.attention import CachedRows, ChunkRows, DecodeRows
from shoal.engine.kv_cache import KVCache, Pool
from shoal.engine.request import Draft
from shoal.engine.sampling import SamplingRows
from shoal.engine.scheduler import Chunk, StepPlan
from shoal.model.loading import Layout

if TYPE_CHECKING:  # the richest of the family stands for all of it
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3Model

Forward: TypeAlias = Callable[[Tensor, Tensor, Layout, Tensor | None], Tensor]
"""Signature: (token_T, position_T, layout, keep_K) -> logits [K, V] of the kept rows; of all rows when `keep_K` is
None."""

FAMILY = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
CONSTANT_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding whose angles depend on the position only."""


def forward_of(model: PreTrainedModel, longest: int) -> Forward:
    """Fastest known forward for a model whose sequences have at most `longest` tokens."""
    return DirectForward(model, longest) if _is_known(model) else ModuleForward(model)


class ModuleForward:
    """Forward of any causal LM through transformers' modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, token_T: Tensor, position_T: Tensor, layout: Layout, keep_K: Tensor | None) -> Tensor:
        """Computes logits; see `Forward`."""
        logits_1KV: Tensor = self._model(
            input_ids=token_T[None],
            position_ids=position_T[None],
            use_cache=False,
            logits_to_keep=0 if keep_K is None else keep_K,
            layout=layout,
        ).logits
        return logits_1KV[0]


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in_W: Tensor
    norm_mid_W: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    norms_D: tuple[Tensor, Tensor] | None
    """Norm weights of queries and keys, where the architecture has them."""
    out_weight_t: Tensor
    gate_up_weight: Tensor
    down_weight_t: Tensor
    scaling: float
    window: int | None


class DirectForward:
    """Forward of a Llama-family model.

    It interleaves the halves of stored key vectors, so no other forward can read them.
    """

    def __init__(self, model: PreTrainedModel, longest: int) -> None:
        config, body = model.config, cast("Qwen3Model", model.model)
        self._embedding_VW = model.get_input_embeddings().weight
        self._head_VW = model.get_output_embeddings().weight
        self._norm_W = body.norm.weight
        self._eps: float = config.rms_norm_eps
        self._layers = [_layer(cast("Qwen3DecoderLayer", layer)) for layer in body.layers]
        self._width: int = body.layers[0].self_attn.head_dim
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        device = self._embedding_VW.device
        at_1L = torch.arange(longest, device=device)[None]
        cos_1LD, sin_1LD = body.rotary_emb(torch.zeros(1, device=device), at_1L)
        half = self._width // 2
        self._rotation_LF = torch.complex(cos_1LD[0, :, :half].contiguous(), sin_1LD[0, :, :half].contiguous())

    def __call__(self, token_T: Tensor, position_T: Tensor, layout: Layout, keep_K: Tensor | None) -> Tensor:
        """Computes logits; see `Forward`."""
        rotation_T1F = self._rotation_LF.index_select(0, position_T).unsqueeze(1)
        x_TW = self._embedding_VW.index_select(0, token_T)
        for index, layer in enumerate(self._layers):
            q, k, v = self._attended(self._normed(x_TW, layer.norm_in_W), layer, rotation_T1F)
            out_TW = layout.attend(index, q, k, v, layer.scaling, layer.window).flatten(1)
            if keep_K is not None and layer is self._layers[-1]:  # the other rows need only keys and values
                x_TW, out_TW = x_TW.index_select(0, keep_K), out_TW.index_select(0, keep_K)
            x_TW = torch.addmm(x_TW, out_TW, layer.out_weight_t)
            gate_up = F.linear(self._normed(x_TW, layer.norm_mid_W), layer.gate_up_weight)
            gate, up = gate_up.chunk(2, -1)
            x_TW = torch.addmm(x_TW, F.silu(gate).mul_(up), layer.down_weight_t)
        return F.linear(self._normed(x_TW, self._norm_W), self._head_VW)

    def _attended(self, x_TW: Tensor, layer: _Layer, rotation_T1F: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D] and keys and values [T, K, D]."""
        heads, kv_heads = self._heads, self._kv_heads
        qkv = F.linear(x_TW, layer.qkv_weight, layer.qkv_bias).view(len(x_TW), heads + 2 * kv_heads, self._width)
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], 1)
        if layer.norms_D is not None:
            q, k = torch.split(qk, [heads, kv_heads], 1)
            qk = torch.cat((self._normed(q, layer.norms_D[0]), self._normed(k, layer.norms_D[1])), 1)
        q, k = torch.split(_rotated(qk, rotation_T1F), [heads, kv_heads], 1)
        return q, k, v

    def _normed(self, x: Tensor, weight_W: Tensor) -> Tensor:
        return F.rms_norm(x, weight_W.shape, weight_W, self._eps)


def _rotated(x_THD: Tensor, rotation_T1F: Tensor) -> Tensor:
    """Rotary embedding of pairs (i, i + D/2), stored side by side; the order does not change dot products."""
    first, second = x_THD.float().chunk(2, -1)
    return torch.view_as_real(torch.complex(first, second).mul_(rotation_T1F)).flatten(-2).to(x_THD.dtype)


def _layer(layer: "Qwen3DecoderLayer") -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    normed = getattr(attention, "q_norm", None) is not None
    return _Layer(
        norm_in_W=layer.input_layernorm.weight,
        norm_mid_W=layer.post_attention_layernorm.weight,
        qkv_weight=_joint([linear.weight for linear in qkv]),
        qkv_bias=None if qkv[0].bias is None else _joint([linear.bias for linear in qkv]),
        norms_D=(attention.q_norm.weight, attention.k_norm.weight) if normed else None,
        out_weight_t=attention.o_proj.weight.t(),
        gate_up_weight=_joint([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down_weight_t=mlp.down_proj.weight.t(),
        scaling=attention.scaling,
        window=_window(attention),
    )


def _joint(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Fuses the parameters and makes each a view of the result, so in-place updates reach the fused tensor."""
    joint = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, torch.split(joint, [len(p) for p in parameters]), strict=True):
        parameter.data = part
    return joint


def _window(attention: "Qwen3Attention") -> int | None:
    """Attention window of a layer in tokens; Mistral's layers keep it in the config only."""
    of_config = type(attention).__name__ == "MistralAttention"
    window: int | None = getattr(attention.config if of_config else attention, "sliding_window", None)
    return window


def _is_known(model: PreTrainedModel) -> bool:
    """Whether the model is a family member as transformers writes it, with no module replaced or added."""
    config = model.config
    if type(model).__name__ not in FAMILY or not type(model).__module__.startswith("transformers."):
        return False
    linears = [module for name, module in model.named_modules() if name.endswith("_proj")]
    biased = ("o_proj", "gate_proj", "up_proj", "down_proj")
    return (
        config.hidden_act == "silu"
        and model.model.rotary_emb.rope_type in CONSTANT_ROTATIONS
        and all(type(linear) is nn.Linear for linear in linears)
        and not any(name.endswith(f"{part}.bias") for name, _ in model.named_parameters() for part in biased)
    )


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
