"""Packed rows through a model: attention of each row over itself, and logprobs of their tokens.

Tokens lie end to end in one row of the batch, `input_ids` is [1, T], and common beginnings are computed once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from shoal.model import MOST_LOGITS
from shoal.model.attention import LONGEST_BY_HAND, Scores, attended
from shoal.model.mixers import Mixer, Run, side_by_side
from shoal.model.prefix_tree import PrefixTree, prefix_tree
from shoal.model.routing import routing_of
from shoal.model.token_logprobs import Kept, logprobs_among, token_logprobs
from shoal.model.training_forward import Forward, modules_of

FEW_POSITIONS = 256
"""Positions up to which queries of a shared beginning are computed again: one more bucket would take longer."""


class PackedRows:
    """Nodes of a prefix tree side by side; each node attends to its own path up to itself.

    Attention runs on whole paths, padded to the longest of their bucket. Padding and shared beginnings thus cost
    attention only: no linear layer computes padding, or a shared token twice. Padding needs no mask, because it follows
    every real token of its path. It is the path's own last node, so that a number that is not finite stays in its row.
    Where attention is by hand, queries of a shared beginning are computed once, too.
    """

    def __init__(
        self, tree: PrefixTree, device: torch.device | str = "cpu", few_positions: int = FEW_POSITIONS
    ) -> None:
        assert tree.tokens
        # (padded length L, node index [R * L] or None for all in order, positions whose queries another path has)
        self._buckets: list[tuple[int, Tensor | None, int]] = []
        self._inverse_T: Tensor | None = None
        lengths = [len(path.nodes) for path in tree.paths]
        if sum(lengths) == len(tree.tokens) and min(lengths) == max(lengths):
            self._buckets.append((lengths[0], None, 0))
            self.positions = len(tree.tokens)
            return
        inverse_T = torch.empty(len(tree.tokens), dtype=torch.long)
        positions = outs = 0
        by_hand = torch.device(device).type == "cpu" and max(lengths) <= LONGEST_BY_HAND
        skips = by_hand and sum(lengths) > few_positions
        for rows in _buckets_of_like_length(lengths, [path.shared if skips else 0 for path in tree.paths]):
            padded = lengths[rows[0]]
            skipped = min(tree.paths[row].shared for row in rows) if skips else 0
            index: list[int] = []
            for row in rows:
                path = tree.paths[row]
                own = slice(path.nodes[path.shared], path.nodes[-1] + 1)
                inverse_T[own] = torch.arange(outs + path.shared - skipped, outs + lengths[row] - skipped)
                index += [*path.nodes, *path.nodes[-1:] * (padded - lengths[row])]
                outs += padded - skipped
            positions += len(index)
            self._buckets.append((padded, torch.tensor(index).to(device), skipped))
        self._inverse_T = inverse_T.to(device)
        self.positions = positions
        """Positions that attention reads, with padding and each path's shared beginning."""

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scores: Scores) -> Tensor:
        """Attends causally within each row."""

        def attend(skipped: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attended(q[:, skipped:] if skipped else q, k, v, scores)

        return self._in_buckets((query_THD, key_TKD, value_TKD), attend)

    def mix(self, mixer: Mixer, inputs_T: Sequence[Tensor], run: Run) -> Sequence[Tensor]:
        """Mixes the tokens of whole rows, from no state; beginnings that rows share are computed in each."""
        parts = [
            tuple(out[:, skipped:].flatten(0, 1) for out in run(rows, None)) for skipped, rows in self._rows(inputs_T)
        ]
        return [out if self._inverse_T is None else out.index_select(0, self._inverse_T) for out in side_by_side(parts)]

    def _in_buckets(self, inputs: Sequence[Tensor], attend: Callable[..., Tensor]) -> Tensor:
        """Result of each bucket's padded rows, back in the order of the nodes."""
        outs = [attend(skipped, *rows).flatten(0, 1) for skipped, rows in self._rows(inputs)]
        if self._inverse_T is None:
            return outs[0]
        return torch.cat(outs).index_select(0, self._inverse_T)

    def _rows(self, inputs: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Rows [R, L, ...] of each bucket, and the number of their first tokens whose outputs are not wanted."""
        for length, index, skipped in self._buckets:
            rows = ((x if index is None else x.index_select(0, index)) for x in inputs)
            yield skipped, [x.reshape(-1, length, *x.shape[1:]) for x in rows]


def _buckets_of_like_length(lengths: Sequence[int], shared: Sequence[int]) -> list[list[int]]:
    """Row indices, longest first, split wherever padding would exceed a quarter of the bucket's longest row.

    Rows that share a quarter of their tokens with others get separate buckets.
    """
    buckets: list[list[int]] = []
    shares = [4 * begun >= length for begun, length in zip(shared, lengths, strict=True)]
    for row in sorted(range(len(lengths)), key=lambda i: (shares[i], -lengths[i])):
        last = buckets[-1][0] if buckets else row
        if buckets and lengths[row] >= 0.75 * lengths[last] and shares[row] == shares[last]:
            buckets[-1].append(row)
        else:
            buckets.append([row])
    return buckets


def packed_logprobs(
    model: Forward,
    tokens_T: Tensor,
    lengths: Sequence[int],
    *,
    temperature: float = 1.0,
    few_positions: int = FEW_POSITIONS,
) -> Tensor:
    """Logprobs [T] (nats, float32, differentiable) of tokens given the tokens before them in their row.

    `tokens_T` holds rows of the given lengths end to end; the first token of each row gets 0.
    """
    # No token predicts the first token of a row.
    firsts = {end - length for end, length in zip(accumulate(lengths), lengths, strict=True)}
    at_N = torch.tensor([i for i in range(len(tokens_T)) if i not in firsts], dtype=torch.long, device=tokens_T.device)
    outputs = packed_outputs(model, tokens_T, lengths, at=at_N, temperature=temperature, few_positions=few_positions)
    return torch.zeros(len(tokens_T), device=tokens_T.device).index_put((at_N,), outputs.logp_N)


@dataclass(frozen=True, slots=True)
class PackedPass:
    """Rows of one forward pass: M nodes of their prefix tree, U of which predict N tokens.

    All of it is made before the pass, because a number that the host reads from a GPU stops both.
    """

    token_M: Tensor
    position_M: Tensor
    layout: PackedRows
    keep_U: Tensor
    """Nodes that predict."""
    chunks: tuple[tuple[slice, Tensor, Tensor, Kept | None], ...]
    """Nodes of each chunk of the head, as a part of U; the predicting one and the id of each token; what could be
    sampled."""
    back_N: Tensor | None
    """Order in which the chunks' tokens are wanted; None for theirs."""
    head_N: Tensor
    """Which of the U nodes predicts each token, in the wanted order."""
    node_T: Tensor
    """Node of each token of the rows laid end to end; M for the last one of a row."""


def packed_pass(
    tree: PrefixTree,
    predicting: Sequence[int],
    tokens: Sequence[int],
    device: torch.device | str,
    *,
    chunk: int,
    kept: Sequence[bytes] | None = None,
    few_positions: int = FEW_POSITIONS,
) -> PackedPass:
    """Pass over a tree whose nodes `predicting` [N] predict `tokens` [N] of `kept` [N], `chunk` nodes at a time."""
    # One node may predict several tokens, such as the first tokens of all answers to a prompt.
    keep_U, head_N = np.unique(np.asarray(predicting, dtype=np.int64), return_inverse=True)
    order_N = np.argsort(head_N, kind="stable") if len(keep_U) > chunk else np.arange(len(head_N))
    starts = range(0, len(keep_U), chunk)
    cuts = [*np.searchsorted(head_N[order_N], starts), len(head_N)] if len(keep_U) > chunk else [0, len(head_N)]
    token_N = np.asarray(tokens, dtype=np.int64)[order_N]
    node_T = np.asarray(tree.node_of, dtype=np.int64)

    def there(numbers: object) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long).to(device, non_blocking=True)

    chunks = []
    for start, first, end in zip(starts, cuts[:-1], cuts[1:], strict=True):
        could = None if kept is None else Kept.of([kept[i] for i in order_N[first:end]], device)
        part = slice(start, start + chunk)
        chunks.append((part, there(head_N[order_N[first:end]] - start), there(token_N[first:end]), could))
    return PackedPass(
        there(tree.tokens),
        there(tree.positions),
        PackedRows(tree, device, few_positions),
        there(keep_U),
        tuple(chunks),
        there(np.argsort(order_N)) if len(keep_U) > chunk else None,
        there(head_N),
        there(np.where(node_T < 0, len(tree.tokens), node_T)),
    )


def trained_pass(
    rows: Sequence[Sequence[int]],
    at: Sequence[int],
    model: Forward,
    *,
    kept: Sequence[bytes] | None = None,
    most_logits: int = MOST_LOGITS,
    few_positions: int = FEW_POSITIONS,
) -> PackedPass | None:
    """Pass over rows laid end to end, for the tokens at the positions `at`; None without any.

    `kept` [N] is `Sample.kept` at these positions. At most `most_logits` logits of the model are kept at a time.
    """
    if not len(at):
        return None
    tree = prefix_tree(rows)
    tokens = [token for row in rows for token in row]
    chunk = max(1, most_logits // modules_of(model).get_input_embeddings().num_embeddings)
    predicting, wanted = [tree.node_of[i - 1] for i in at], [tokens[i] for i in at]
    device = modules_of(model).device
    return packed_pass(tree, predicting, wanted, device, chunk=chunk, kept=kept, few_positions=few_positions)


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """Outputs of the model for N tokens, float32."""

    logp_N: Tensor
    """Nats: logprobs of the tokens."""
    entropy_N: Tensor | None
    """Nats: entropy of the distribution of each token; None unless asked for."""
    value_N: Tensor | None
    """Output of the value head for the text before each token; None without a value head."""


def packed_outputs(
    model: Forward,
    tokens_T: Tensor,
    lengths: Sequence[int],
    *,
    at: Tensor,
    temperature: float = 1.0,
    entropy: Literal["value", "gradient"] | None = None,
    value_head: nn.Module | None = None,
    routing_TB: Tensor | None = None,
    most_logits: int = MOST_LOGITS,
    few_positions: int = FEW_POSITIONS,
) -> TokenOutputs:
    """Logprobs of the tokens at the positions `at` [N], none of them the first of its row, as in `packed_logprobs`.

    Common beginnings of rows are computed once, and only hidden states that predict a selected token pass through the
    language-model head. `entropy` adds the entropies (nats) of the sampling distributions; their gradient keeps more
    memory of the size of the logits. A value head maps hidden states [U, D], the inputs of the language-model head, to
    [U, 1]. A model with a `Routing` uses the stored experts `routing_TB` of the tokens, or its own choice without. At
    most `most_logits` logits are kept at a time.
    """
    tokens: list[int] = tokens_T.tolist()
    rows = [tokens[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]
    made = trained_pass(rows, at.tolist(), model, most_logits=most_logits, few_positions=few_positions)
    return pass_outputs(
        model, made, temperature=temperature, entropy=entropy, value_head=value_head, routing_TB=routing_TB
    )


def pass_outputs(
    model: Forward,
    made: PackedPass | None,
    *,
    temperature: float = 1.0,
    entropy: Literal["value", "gradient"] | None = None,
    value_head: nn.Module | None = None,
    routing_TB: Tensor | None = None,
) -> TokenOutputs:
    """Outputs as `packed_outputs` gives them, of a pass that was made before."""
    if made is None:
        nothing = torch.zeros(0, device=modules_of(model).device)
        return TokenOutputs(nothing, None if entropy is None else nothing, None if value_head is None else nothing)
    if isinstance(model, PreTrainedModel) and (routing := routing_of(model)) is not None:
        routing.given_TE = None if routing_TB is None else _of_nodes(routing.read(routing_TB), made)
    hidden_UD, head = _hidden(model, made)
    logp_N, entropy_N = _head_outputs(
        modules_of(model), head, hidden_UD, made, temperature=temperature, entropy=entropy
    )
    value_N = None if value_head is None else value_head(hidden_UD.float()).float()[made.head_N, 0]
    return TokenOutputs(logp_N, entropy_N, value_N)


def _of_nodes(routing_TE: Tensor, made: PackedPass) -> Tensor:
    """Experts of each node of the tree; rows that share tokens have them from one computation."""
    nodes = len(made.token_M)
    node_T = torch.where((routing_TE >= 0).all(-1), made.node_T, nodes)  # one more row takes those without a node
    routing_UE = routing_TE.new_full((nodes + 1, routing_TE.shape[1]), -1)
    return routing_UE.index_copy_(0, node_T, routing_TE)[:nodes]


def _hidden(model: Forward, made: PackedPass) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Inputs [U, D] of the language-model head at the kept nodes, and the head."""
    if not isinstance(model, nn.Module):
        return model.hidden(made.token_M, made.position_M, made.layout, made.keep_U), model.head
    modules = modules_of(model)
    with _hidden_states(modules) as hidden:
        modules(
            input_ids=made.token_M[None],
            position_ids=made.position_M[None],
            use_cache=False,
            logits_to_keep=made.keep_U,
            layout=made.layout,
        )
    return hidden[0], modules.get_output_embeddings()


def _head_outputs(
    model: PreTrainedModel,
    head: Callable[[Tensor], Tensor],
    hidden_UD: Tensor,
    made: PackedPass,
    *,
    temperature: float,
    entropy: Literal["value", "gradient"] | None,
) -> tuple[Tensor, Tensor | None]:
    """Logprob and entropy of each token.

    The language-model head runs on a chunk of hidden states at a time, and again in the backward pass. So never more
    than a chunk's logits are kept, however many tokens there are.
    """
    config = model.config

    def outputs(part_UD: Tensor, at_N: Tensor, wanted_N: Tensor, kept: Kept | None) -> tuple[Tensor, Tensor]:
        logits_UV = _scaled(head(part_UD), config)
        among_N = None if kept is None else logprobs_among(logits_UV, at_N, wanted_N, kept, temperature)
        logp_N, entropy_U = token_logprobs(logits_UV, at_N, wanted_N, temperature=temperature, entropy=entropy)
        if kept is not None and among_N is not None:
            logp_N = torch.where(kept.some_N, among_N, logp_N)
        return logp_N, entropy_U[at_N]

    if made.back_N is None:
        ((_, at_N, token_N, could),) = made.chunks
        logp_N, entropy_N = outputs(hidden_UD, at_N, token_N, could)
        return logp_N, None if entropy is None else entropy_N
    parts = [
        checkpoint(outputs, hidden_UD[of_head], *one, use_reentrant=False, preserve_rng_state=False)
        for of_head, *one in made.chunks
    ]
    logp_N, entropy_N = (torch.cat(list(columns))[made.back_N] for columns in zip(*parts, strict=True))
    return logp_N, None if entropy is None else entropy_N


def _scaled(logits: Tensor, config: PretrainedConfig) -> Tensor:
    """Logits of the head, scaled as the architecture defines; loading refuses any other change of logits."""
    if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits = logits * factor
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


@contextmanager
def _hidden_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collects the inputs [U, D] of the language-model head in the forwards inside; the head gets only the first."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(arguments[0][0])
        return (arguments[0][:, :1],)

    hook = model.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        yield seen
    finally:
        hook.remove()


def target_logprobs(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    targets: Sequence[Tensor],
    *,
    apart: Sequence[int] | None = None,
    on_nodes: Callable[[Sequence[int]], None] | None = None,
) -> list[Tensor]:
    """Logprobs (nats, float32, differentiable) of any tokens after each token of each row.

    `targets[r]` is [L] or [L, K]: one or K tokens that may follow each of the row's L tokens, K alike in all rows. The
    result has the same shapes. Rows with different numbers in `apart` share no computation; `on_nodes` is called
    before the forward with the number of each computed token, in rising order.
    """
    numbers = apart or [0] * len(rows)
    # A row's last token predicts too, so one more follows. The upper bits keep rows apart.
    tree = prefix_tree([[n << 32 | t for t in (*row, 0)] for n, row in zip(numbers, rows, strict=True)])
    if on_nodes is not None:
        on_nodes([token >> 32 for token in tree.tokens])
    target_TK = torch.cat([target.reshape(len(row), -1) for row, target in zip(rows, targets, strict=True)])
    predicting = [node for node in tree.node_of if node >= 0 for _ in range(target_TK.shape[1])]
    chunk = max(1, MOST_LOGITS // model.get_input_embeddings().num_embeddings)
    shown = replace(tree, tokens=tuple(t & (1 << 32) - 1 for t in tree.tokens))
    made = packed_pass(shown, predicting, target_TK.flatten().tolist(), model.device, chunk=chunk)
    hidden_UD, head = _hidden(model, made)
    logp_N, _ = _head_outputs(model, head, hidden_UD, made, temperature=1.0, entropy=None)
    parts = torch.split(logp_N.view(target_TK.shape), [len(row) for row in rows])
    return [part.reshape(target.shape) for part, target in zip(parts, targets, strict=True)]
