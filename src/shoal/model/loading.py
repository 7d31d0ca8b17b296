"""Hugging Face causal LMs in and out, with packed and cached attention through transformers' attention interface.

No model code of our own: an attention function named `shoal` is registered with transformers, and each forward carries
a `Layout` that says how the tokens of that forward attend to each other and to what came before. No mask is ever built
by transformers, because none is registered for that name.

Tokens are always laid end to end in one row of the batch: `input_ids` is [1, T].
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from shoal.errors import ModelError
from shoal.model.prefix_tree import PrefixTree, prefix_tree

ATTENTION = "shoal"
IGNORED: Final = frozenset({"position_ids", "use_cache", "output_hidden_states", "output_router_logits"})
"""Arguments of attention that change nothing, whatever their value."""
HARMLESS: Final[Mapping[str, tuple[object, ...]]] = {
    "dropout": (0.0,),
    "is_causal": (True,),
    "output_attentions": (False,),
}
"""Values of other arguments that change nothing; None never does."""
PROBE = ((5, 6, 7, 8, 9, 10), (5, 6, 4, 3))
PROBE_BOUND_NATS = {torch.float32: 1e-3, torch.bfloat16: 0.25}
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
    **others: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: [1, H, T, D] in, [1, T, H, D] out."""
    if layout is None:
        raise ModelError("this model attends through a Layout: call it through shoal.model.loading, not directly")
    _refuse_unknown({**others, "attention_mask": attention_mask})
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


def _refuse_unknown(arguments: Mapping[str, object]) -> None:
    """Raises `ModelError` for an argument of attention that would change the result and is not computed here.

    Attention sinks (`s_aux`), capped logits and masks of a model's own come as such arguments; leaving one out would
    compute another model, in the trainer and in the engine alike.
    """
    for name, value in arguments.items():
        if value is not None and name not in IGNORED and value not in HARMLESS.get(name, ()):
            raise ModelError(f"the model's attention is given {name!r}, which is not supported")


def _refuse_different(model: PreTrainedModel) -> None:
    """Raises `ModelError` unless packed rows get the logprobs that transformers' own attention gives each alone.

    Whatever else of an architecture a `Layout` cannot express shows here: states that are carried from token to token
    over the end of a row, attention that never asks the layout.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    rows = [torch.tensor(row, device=model.device) % vocabulary for row in PROBE]
    with torch.no_grad():
        try:
            logp_T, _ = packed_logprobs(model, torch.cat(rows), [len(row_L) for row_L in rows])
            model.set_attn_implementation("eager")
            own = [model(row_L[None], use_cache=False).logits[0].float().log_softmax(-1) for row_L in rows]
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ModelError(f"models of kind {model.config.model_type!r} are not supported: {reason}") from error
        finally:
            model.set_attn_implementation(ATTENTION)
    zero = torch.zeros(1, device=model.device)
    expected = [
        torch.cat([zero, logp_LV[:-1].gather(-1, row_L[1:, None])[:, 0]])
        for logp_LV, row_L in zip(own, rows, strict=True)
    ]
    distance = (torch.cat(expected) - logp_T).abs().mean().item()
    if not distance <= PROBE_BOUND_NATS[model.dtype]:
        raise ModelError(
            f"models of kind {model.config.model_type!r} are not supported: logprobs of packed rows are {distance:.3g} "
            "nats from transformers' own"
        )


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
    _refuse_different(model)
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
    """The nodes of a prefix tree side by side; each sees its own path up to itself.

    Attention runs on whole paths padded to the longest of their bucket, so that pads and shared beginnings cost
    attention only: no linear layer sees a pad, or a shared token twice. Pads need no mask: they come after every real
    token of their path.
    """

    def __init__(self, tree: PrefixTree, device: torch.device | str = "cpu") -> None:
        assert tree.tokens
        self._buckets: list[
            tuple[int, Tensor | None]
        ] = []  # (padded length, node index [R * L], None for all in order)
        self._inverse_T: Tensor | None = None
        lengths = [len(path.nodes) for path in tree.paths]
        if sum(lengths) == len(tree.tokens) and min(lengths) == max(lengths):
            self._buckets.append((lengths[0], None))
            self.positions = len(tree.tokens)
            return
        inverse_T = torch.empty(len(tree.tokens), dtype=torch.long)
        base = 0
        for rows in _buckets_of_like_length(lengths):
            padded = lengths[rows[0]]
            index: list[int] = []
            for row in rows:
                path = tree.paths[row]
                own = slice(path.nodes[path.shared], path.nodes[-1] + 1)
                start = base + len(index)
                inverse_T[own] = torch.arange(start + path.shared, start + lengths[row])
                index += [*path.nodes, *(0,) * (padded - lengths[row])]
            base += len(index)
            self._buckets.append((padded, torch.tensor(index).to(device)))
        self._inverse_T = inverse_T.to(device)
        self.positions = base
        """How many attention computes, with pads and each path's shared beginning."""

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
    entropy_gradient: bool = False,
    at: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Logprobs (nats, float32, differentiable) of tokens given those before them in their row.

    `tokens_T` holds rows of the given lengths end to end. `at` [N] are the token positions that are wanted, none of
    them the first of its row; without it every token is, and the first of each row gets 0. Common beginnings of rows
    are computed once, and only what predicts a wanted token passes through the language-model head. The entropies
    (nats, of the distributions the tokens were drawn from) are None unless asked for; they carry a gradient only with
    `entropy_gradient`, for which more of the size of the logits is kept.
    """
    wanted_N = at
    if at is None:
        # The first token of each row is predicted by nothing.
        firsts = {end - length for end, length in zip(accumulate(lengths), lengths, strict=True)}
        wanted_N = torch.tensor([i for i in range(len(tokens_T)) if i not in firsts], dtype=torch.long)
        wanted_N = wanted_N.to(tokens_T.device)
    assert wanted_N is not None
    outputs = packed_outputs(
        model,
        tokens_T,
        lengths,
        at=wanted_N,
        temperature=temperature,
        with_entropy=with_entropy,
        entropy_gradient=entropy_gradient,
    )
    if at is not None:
        return outputs.logp_N, outputs.entropy_N
    zeros_T = torch.zeros(tokens_T.shape[0], device=tokens_T.device)
    entropy_N = outputs.entropy_N
    return (
        zeros_T.index_put((wanted_N,), outputs.logp_N),
        None if entropy_N is None else zeros_T.index_put((wanted_N,), entropy_N),
    )


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What the model says of N tokens, float32."""

    logp_N: Tensor
    """Logprobs, nats."""
    entropy_N: Tensor | None
    """Nats, of the distributions the tokens were drawn from; None unless asked for."""
    value_N: Tensor | None
    """What the value head gives for the text before each token; None without one."""


def packed_outputs(
    model: PreTrainedModel,
    tokens_T: Tensor,
    lengths: Sequence[int],
    *,
    at: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    value_head: nn.Module | None = None,
) -> TokenOutputs:
    """`packed_logprobs` of the tokens at the positions `at` [N], and their values if there is a `value_head`.

    A value head maps hidden states [U, D], as the language-model head sees them, to [U, 1].
    """
    device = tokens_T.device
    if not len(at):
        nothing = torch.zeros(0, device=device)
        return TokenOutputs(nothing, nothing if with_entropy else None, None if value_head is None else nothing)
    tokens: list[int] = tokens_T.tolist()
    ends = list(accumulate(lengths))
    tree = prefix_tree([tokens[end - length : end] for end, length in zip(ends, lengths, strict=True)])
    node_T = torch.tensor(tree.node_of, device=device)
    # Several tokens may be predicted from one node: the first tokens of all answers to a prompt are.
    heads_U, head_N = torch.unique(node_T[at - 1], return_inverse=True)
    with _hidden_states(model) as hidden:
        logits_UV = model(
            input_ids=torch.tensor(tree.tokens, device=device)[None],
            position_ids=torch.tensor(tree.positions, device=device)[None],
            use_cache=False,
            logits_to_keep=heads_U,
            layout=PackedRows(tree, device),
        ).logits[0]
    logits_UV = logits_UV.float()
    if temperature != 1.0:
        logits_UV = logits_UV / temperature
    lse_U = logits_UV.logsumexp(-1)
    logp_N = logits_UV[head_N, tokens_T[at]] - lse_U[head_N]
    value_N = None if value_head is None else value_head(hidden[0].float()).float()[head_N, 0]
    if not with_entropy:
        return TokenOutputs(logp_N, None, value_N)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        return TokenOutputs(logp_N, _entropy(logits_UV, lse_U)[head_N], value_N)


@contextmanager
def _hidden_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collects what the language-model head sees [U, D] in the forwards inside."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        seen.append(arguments[0][0])

    hook = model.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        yield seen
    finally:
        hook.remove()


def _entropy(logits_NV: Tensor, lse_N: Tensor) -> Tensor:
    """Entropy in nats of the softmax of each row of logits."""
    return lse_N - (torch.exp(logits_NV - lse_N[:, None]) * logits_NV).sum(-1)
