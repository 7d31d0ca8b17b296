"""The trainer bench sets a training step against the bare forward and backward of the same packed tokens.

The bare side has its tokens, positions and attention layouts ready, and does only forward, cross entropy and backward.
The step also packs, computes entropies, ratios, the loss and its statistics, clips, and takes an Adam update.
"""

import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmarks.model import write_bench_model
from benchmarks.rows import groups
from shoal import wire
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.model.packed import PackedRows
from shoal.model.prefix_tree import prefix_tree
from shoal.trainer.messages import Step, request_from
from shoal.trainer.packing import Packer, micro_batches
from shoal.trainer.trainer import Trainer
from shoal.types import Sample

Report = dict[str, object]
ROUNDS = 5
GROUPS = 8


def measure(quick: bool) -> Report:
    """Measures the figures on one thread."""
    torch.set_num_threads(1)
    batch = groups(2 if quick else GROUPS, shared_prompts=True)
    with tempfile.TemporaryDirectory() as folder:
        write_bench_model(Path(folder))
        trainer = Trainer(folder, ModelConfig(device="cpu"), TrainConfig(groups_per_step=len(batch)))
    rows = [row for group in batch for row in group]
    bare = [Bare([rows[i] for i in part]) for part in micro_batches(rows, trainer.tokens_per_microbatch)]
    step_s, bare_s, message_s = [], [], []
    for _ in range(1 if quick else ROUNDS):
        bare_s.append(bare_seconds(trainer.model, bare))
        step_s.append(trainer.step(batch, 0).seconds)
        message_s.append(message_seconds(batch, trainer.tokens_per_microbatch))
    tokens = sum(len(row.tokens) for row in rows)
    return {
        "ratio": min(bare_s) / min(step_s),
        "step_tokens_per_s": tokens / min(step_s),
        "bare_tokens_per_s": tokens / min(bare_s),
        "step_s": min(step_s),
        "bare_s": min(bare_s),
        "message_s": min(message_s),
        "tokens": tokens,
        "computed_tokens": sum(len(part.tokens_1T[0]) for part in bare),
        "rows": len(rows),
        "microbatches": len(bare),
        "parameters": sum(one.numel() for one in trainer.model.parameters() if one.requires_grad),
    }


class Bare:
    """Tensors of a micro-batch, ready for the bare side."""

    def __init__(self, rows: list[Sample]) -> None:
        tree = prefix_tree([row.tokens for row in rows])
        self.tokens_1T = torch.tensor(tree.tokens)[None]
        self.positions_1T = torch.tensor(tree.positions)[None]
        self.layout = PackedRows(tree)
        trained = [i for i, m in enumerate(m for row in rows for m in row.mask) if m]
        tokens = [token for row in rows for token in row.tokens]
        self.target_N = torch.tensor([tokens[i] for i in trained])
        self.keep_U, self.head_N = torch.unique(
            torch.tensor([tree.node_of[i - 1] for i in trained]), return_inverse=True
        )

    def loss(self, model: PreTrainedModel) -> Tensor:
        """Mean cross entropy of the trained tokens."""
        logits_UV = model(
            input_ids=self.tokens_1T,
            position_ids=self.positions_1T,
            use_cache=False,
            logits_to_keep=self.keep_U,
            layout=self.layout,
        ).logits[0]
        return F.cross_entropy(logits_UV[self.head_N].float(), self.target_N)


def bare_seconds(model: PreTrainedModel, batches: list[Bare]) -> float:
    """Seconds of forward and backward of all micro-batches."""
    model.zero_grad()
    began_s = time.perf_counter()
    for batch in batches:
        batch.loss(model).backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - began_s
    model.zero_grad()
    return seconds


def message_seconds(batch: list[tuple[Sample, ...]], budget_tokens: int) -> float:
    """Seconds to pack the step's request and to read it again, as main and trainer process do."""
    began_s = time.perf_counter()
    (shares,) = Packer(TrainConfig(), budget_tokens).step(batch)
    request_from(wire.encode(Step(shares, 0)))
    return time.perf_counter() - began_s
