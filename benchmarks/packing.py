"""What packing gains: forward and backward over the same rows, packed end to end and padded to the longest.

Lengths are heavy-tailed and every row has a prompt of its own, so that nothing is gained from shared prompts. The
padded side is transformers with its scaled-dot-product attention; it computes the language-model head for real tokens
only, and has the best of several batch sizes, in the order in which rows come and sorted by length.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.model import write_bench_model
from benchmarks.rows import groups
from shoal.model.loading import load_model
from shoal.model.packed import PackedRows, packed_outputs
from shoal.model.prefix_tree import prefix_tree
from shoal.trainer.packing import micro_batches, tokens_per_microbatch
from shoal.types import Sample

Report = dict[str, object]
BATCHES = (4, 8, 16)
"""Rows of a padded batch."""
ROUNDS = 3


def measure(quick: bool) -> Report:
    """Measures the figures on one thread."""
    torch.set_num_threads(1)
    rows = [row for group in groups(2 if quick else 8, shared_prompts=False) for row in group]
    return compared(rows, BATCHES[1:2] if quick else BATCHES, 1 if quick else ROUNDS)


def compared(rows: Sequence[Sample], sizes: Sequence[int], rounds: int) -> Report:
    """Compares the best of some rounds of packed rows with the best of padded batches of several sizes."""
    with tempfile.TemporaryDirectory() as folder:
        write_bench_model(Path(folder))
        packed_model = load_model(folder)
        padded_model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    config = packed_model.config
    stream = config.num_hidden_layers * config.hidden_size
    budget = tokens_per_microbatch(config.vocab_size, stream, on_gpu=False)
    packed = [[rows[i] for i in part] for part in micro_batches(rows, budget)]
    by_length = sorted(rows, key=lambda row: len(row.tokens))
    sides = {
        (name, size): slices(order, size) for name, order in (("", rows), ("_sorted", by_length)) for size in sizes
    }
    seconds: dict[tuple[str, int], list[float]] = {side: [] for side in sides}
    packed_s: list[float] = []
    gradients = packed_gradient(packed_model, packed), padded_gradient(padded_model, slices(rows, sizes[0]))
    for _ in range(rounds):
        packed_s.append(timed(partial(packed_gradient, packed_model, packed)))
        for side, batches in sides.items():
            seconds[side].append(timed(partial(padded_gradient, padded_model, batches)))
    best = {name: min(min(times) for (kind, _), times in seconds.items() if kind == name) for name in ("", "_sorted")}
    tokens = sum(len(row.tokens) for row in rows)
    size = min(sides, key=lambda side: min(seconds[side]) if side[0] == "" else float("inf"))[1]
    return {
        "useful_share": useful_share(packed_model, packed),
        "attention_useful_share": attention_useful_share(packed),
        "padded_useful_share": padded_share(slices(rows, size)),
        "speedup": best[""] / min(packed_s),
        "speedup_sorted": best["_sorted"] / min(packed_s),
        "packed_tokens_per_s": tokens / min(packed_s),
        "padded_tokens_per_s": tokens / best[""],
        "padded_rows_per_batch": size,
        "rows": len(rows),
        "tokens": tokens,
        "longest": max(len(row.tokens) for row in rows),
        "tokens_per_microbatch": budget,
        "gradient_difference": float((gradients[0] - gradients[1]).norm() / gradients[0].norm()),
    }


def slices(rows: Sequence[Sample], size: int) -> list[Sequence[Sample]]:
    """Cuts rows into batches of `size`, in order; the last may have fewer."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def timed(gradient: Callable[[], Tensor]) -> float:
    """Seconds of a call."""
    began_s = time.perf_counter()
    gradient()
    return time.perf_counter() - began_s


def packed_gradient(model: PreTrainedModel, batches: Sequence[Sequence[Sample]]) -> Tensor:
    """Gradient of the head for the summed logprobs of all trained tokens, over packed rows."""
    model.zero_grad()
    for rows in batches:
        tokens_T = torch.tensor([token for row in rows for token in row.tokens])
        at_N = torch.tensor([m for row in rows for m in row.mask]).nonzero()[:, 0]
        outputs = packed_outputs(model, tokens_T, [len(row.tokens) for row in rows], at=at_N)
        outputs.logp_N.sum().backward()  # type: ignore[no-untyped-call]
    return _head_gradient(model)


def padded_gradient(model: PreTrainedModel, batches: Sequence[Sequence[Sample]]) -> Tensor:
    """Gradient of the head for the summed logprobs of all trained tokens, over rows padded to their batch's longest."""
    model.zero_grad()
    for rows in batches:
        longest = max(len(row.tokens) for row in rows)
        tokens_BL = torch.tensor([[*row.tokens, *(0,) * (longest - len(row.tokens))] for row in rows])
        real_BL = torch.tensor([[j < len(row.tokens) for j in range(longest)] for row in rows])
        trained_BL = torch.tensor([[*map(bool, row.mask), *(False,) * (longest - len(row.mask))] for row in rows])
        hidden_BLD = model.model(input_ids=tokens_BL, attention_mask=real_BL, use_cache=False).last_hidden_state
        logits_NV = model.lm_head(hidden_BLD[:, :-1][trained_BL[:, 1:]])
        loss = -F.cross_entropy(logits_NV.float(), tokens_BL[trained_BL], reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
    return _head_gradient(model)


def _head_gradient(model: PreTrainedModel) -> Tensor:
    gradient = model.get_output_embeddings().weight.grad
    assert gradient is not None
    result: Tensor = gradient.clone()
    return result


def useful_share(model: PreTrainedModel, batches: Sequence[Sequence[Sample]]) -> float:
    """Share of computed positions from which a token is predicted: all but a row's last."""
    computed = 0

    def count(_: torch.nn.Module, __: object, out_BLD: Tensor) -> None:
        nonlocal computed
        computed += out_BLD.shape[0] * out_BLD.shape[1]

    hook = model.get_input_embeddings().register_forward_hook(count)
    packed_gradient(model, batches)
    hook.remove()
    # Prompts that begin with the same token by chance compute it once.
    return min(1.0, sum(len(row.tokens) - 1 for rows in batches for row in rows) / computed)


def attention_useful_share(batches: Sequence[Sequence[Sample]]) -> float:
    """Share of useful positions in attention, where rows of like length are padded to their longest."""
    useful = padded = 0
    for rows in batches:
        layout = PackedRows(prefix_tree([row.tokens for row in rows]))
        useful += sum(len(row.tokens) - 1 for row in rows)
        padded += layout.positions
    return useful / padded


def padded_share(batches: Sequence[Sequence[Sample]]) -> float:
    """Share of the positions of padded batches that hold a token."""
    computed = sum(len(rows) * max(len(row.tokens) for row in rows) for rows in batches)
    return sum(len(row.tokens) for rows in batches for row in rows) / computed
