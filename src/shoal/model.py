"""Hugging Face causal LMs in and out, with packed and cached attention through transformers' attention interface.

No model code of our own: an attention function named `shoal` is registered with transformers, and each forward carries
a `Layout` that says how the tokens of that forward attend to each other and to what came before. No mask is ever built
by transformers, because none is registered for that name.

Tokens are always laid end to end in one row of the batch: `input_ids` is [1, T].
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from shoal.errors import ModelError

ATTENTION = "shoal"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Layout(Protocol):
    """How the T tokens of one forward attend."""

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Attention of one layer: H query heads, K key-value heads; the result is [T, H, D].

        `window` is how many tokens back, itself included, a token may look; None is all of them.
        """
        ...


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: [1, H, T, D] in, [1, T, H, D] out."""
    if layout is None:
        raise ModelError("this model attends through a Layout: call it through shoal.model, not directly")
    out_THD = layout.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window,
    )
    return out_THD.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attend)


def load_model(
    path: Path | str, *, dtype: str = "float32", device: str = "cpu", gradient_checkpointing: bool = False
) -> PreTrainedModel:
    """The causal LM of a directory or hub name, in evaluation mode. Raises `ModelError`."""
    try:
        config = AutoConfig.from_pretrained(path)
        refuse_unsupported(config)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=DTYPES[dtype], attn_implementation=ATTENTION
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"model {str(path)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    model.to(device).eval()
    if gradient_checkpointing:
        _checkpoint_layers(model)
    return model


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Has layers forget their activations and compute them again in the backward pass."""
    # The older name is the only one before transformers 5.23 and a warning since.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in model.modules():
        # Layers checkpoint in training mode only; what is inside them stays in evaluation mode, without dropout.
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def refuse_unsupported(config: object) -> None:
    """Raises `ModelError` for architectures whose attention cannot be expressed by a Layout."""
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ModelError("models that cap attention logits (such as Gemma 2) are not supported")
    kinds = set(getattr(config, "layer_types", None) or ())
    foreign = kinds - {"full_attention", "sliding_attention"}
    if foreign:
        raise ModelError(f"layers of kind {sorted(foreign)[0]!r} are not supported: only full and sliding attention is")


def resolve_device(device: str) -> str:
    """`auto` as a device name that this machine has."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


class PackedRows:
    """Rows laid end to end; each token sees its own row up to itself.

    Attention runs on rows padded to the longest of their bucket, so that a pad costs attention only and no linear
    layer ever sees one. Pads need no mask: they come after every real token of their row.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        """`lengths` are the rows' lengths in tokens; their sum is T."""
        assert lengths and min(lengths) > 0
        self.positions_T = torch.cat([torch.arange(n) for n in lengths]).to(device)
        self._buckets: list[tuple[int, Tensor | None]] = []  # (padded length, token index [R * L], None if all rows)
        self._inverse_T: Tensor | None = None
        if min(lengths) == max(lengths):
            self._buckets.append((lengths[0], None))
            return
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        inverse_T = torch.empty(starts[-1], dtype=torch.long)
        base = 0
        for rows in _buckets_of_like_length(lengths):
            padded = lengths[rows[0]]
            index_RL = torch.zeros(len(rows), padded, dtype=torch.long)
            for i, row in enumerate(rows):
                n = lengths[row]
                index_RL[i, :n] = torch.arange(starts[row], starts[row] + n)
                inverse_T[starts[row] : starts[row] + n] = torch.arange(base + i * padded, base + i * padded + n)
            base += len(rows) * padded
            self._buckets.append((padded, index_RL.flatten().to(device)))
        self._inverse_T = inverse_T.to(device)

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Causal attention within each row."""
        outs = []
        for length, index in self._buckets:
            q, k, v = (
                (x if index is None else x.index_select(0, index)).reshape(-1, length, *x.shape[1:]).transpose(1, 2)
                for x in (query_THD, key_TKD, value_TKD)
            )
            banded = window is not None and window < length
            out_RHLD = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=_band(length, window, q.device) if window is not None and banded else None,
                is_causal=not banded,
                scale=scaling,
                enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
            )
            outs.append(out_RHLD.transpose(1, 2).flatten(0, 1))
        if self._inverse_T is None:
            return outs[0]
        return torch.cat(outs).index_select(0, self._inverse_T)


def _buckets_of_like_length(lengths: Sequence[int]) -> list[list[int]]:
    """Row indices, longest first, split wherever padding would exceed a quarter of the bucket's longest row."""
    buckets: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if buckets and lengths[row] >= 0.75 * lengths[buckets[-1][0]]:
            buckets[-1].append(row)
        else:
            buckets.append([row])
    return buckets


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[L, L] true where a query may look: at most `window` tokens back, itself included."""
    i = torch.arange(length, device=device)
    distance = i[:, None] - i[None, :]
    return (distance >= 0) & (distance < window)


def packed_logprobs(
    model: PreTrainedModel,
    tokens_T: Tensor,
    lengths: Sequence[int],
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    at: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Logprobs (nats, float32, differentiable) of tokens given those before them in their row.

    `tokens_T` holds rows of the given lengths end to end. `at` [N] are the token positions that are wanted, none of
    them the first of its row; without it every token is, and the first of each row gets 0. Only wanted positions pass
    through the language-model head. The entropies (nats, of the distributions the tokens were drawn from) carry no
    gradient; they are None unless asked for.
    """
    layout = PackedRows(lengths, tokens_T.device)
    wanted_N = at if at is not None else (layout.positions_T > 0).nonzero()[:, 0]
    logits_NV = model(
        input_ids=tokens_T[None],
        position_ids=layout.positions_T[None],
        use_cache=False,
        logits_to_keep=wanted_N - 1,
        layout=layout,
    ).logits[0]
    logits_NV = logits_NV.float()
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    lse_N = logits_NV.logsumexp(-1)
    logp_N = logits_NV.gather(-1, tokens_T[wanted_N, None])[:, 0] - lse_N
    entropy_N = _entropy(logits_NV.detach(), lse_N.detach()) if with_entropy else None
    if at is not None:
        return logp_N, entropy_N
    zeros_T = torch.zeros(tokens_T.shape[0], device=tokens_T.device)
    logp_T = zeros_T.index_put((wanted_N,), logp_N)
    return logp_T, None if entropy_N is None else zeros_T.index_put((wanted_N,), entropy_N)


def _entropy(logits_NV: Tensor, lse_N: Tensor) -> Tensor:
    """Entropy in nats of the softmax of each row of logits."""
    return lse_N - (torch.exp(logits_NV - lse_N[:, None]) * logits_NV).sum(-1)
