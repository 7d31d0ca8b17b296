"""`python -m shoal.trainer.fake_run`: memory that a rank would take in a forward and a backward pass, without numbers.

The trainer itself runs with fake tensors, so what it makes is what a real rank would make: sizes, dtypes, placements,
collectives. torch's memory tracker measures it.

It reads a `FakeQuestion` from standard input and prints a `FakeTaken` for each size of a micro-batch.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.model import token_logprobs
from shoal.model.checkpoint_names import checkpoint_tensors
from shoal.model.loading import empty_model
from shoal.trainer.messages import FakeQuestion, FakeTaken
from shoal.trainer.packing import Minibatch, RowBatch
from shoal.trainer.ranks import Ranks, leave, local
from shoal.trainer.step_stats import StepTotals
from shoal.trainer.trainer import Moment, Trainer
from shoal.types import Sample


class ShapesOnly:
    """Tensors of a checkpoint that have shapes and no numbers."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> None:
        self.shapes, self._dtype = shapes, dtype

    @classmethod
    def of_config(cls, path: Path) -> "ShapesOnly":
        """Tensors that a checkpoint with the `config.json` in a directory has. Raises `ModelError`."""
        model = empty_model(path)
        tensors = checkpoint_tensors(model, dict(model.named_parameters()))
        return cls({name: tuple(one.shape) for name, one in tensors.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def whole(self, name: str) -> Tensor:
        """One tensor."""
        return torch.empty(self.shapes[name], dtype=self._dtype)

    def rows(self, name: str, rows: slice) -> Tensor:
        """Rows of one tensor."""
        count, *rest = self.shapes[name]
        return torch.empty((len(range(count)[rows]), *rest), dtype=self._dtype)


@contextmanager
def fake_rank(ranks: Ranks, device: str) -> Iterator[FakeTensorMode]:
    """One of several ranks, inside; the process must be in no group. Every tensor made inside is fake."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=ranks.index, world_size=ranks.count)
    try:
        ranks.mesh(device)  # it has numbers
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        leave()


DEVICE = "cpu"
"""Device of the fake tensors: the one that every build of torch has. Sizes are those of any other."""


class _Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """Memory of all tensors; it keeps no figures of modules, because the head runs many times."""

    def _pre_fw_hook(self, module: nn.Module, inputs: object) -> None: ...

    def _post_fw_hook(self, module: nn.Module, inputs: object, outputs: object) -> None: ...

    def _pre_bw_hook(self, module: nn.Module, args: object) -> None: ...

    def _post_bw_hook(self, module: nn.Module, args: object) -> None: ...


def row(tokens: int, vocabulary: int, first: int) -> Sample:
    """Row of which half is an answer; no two rows share a beginning."""
    prompt = tokens // 2
    ids = tuple((first + place) % vocabulary for place in range(tokens))
    trained = (0,) * prompt + (1,) * (tokens - prompt)
    logprobs = tuple(-1.0 * m for m in trained)
    return Sample(ids, trained, logprobs, tuple(m - 1 for m in trained), tuple(map(float, trained)))


def measured(question: FakeQuestion) -> Iterator[FakeTaken]:
    """Memory for each number of tokens, in the order of the question."""
    model = ModelConfig.model_validate_json(question.model_json)
    train = TrainConfig.model_validate_json(question.train_json)
    if train.backend.startswith("torchtitan"):  # its ranks hold as much, and compute with no more
        train = train.model_copy(update={"backend": "sharded"})
    path, ranks = Path(question.model_path), Ranks(0, question.ranks, question.shard)
    token_logprobs.BLOCK_LOGITS = token_logprobs.BLOCK_LOGITS_OF_GPU  # in this process alone
    with fake_rank(ranks, DEVICE):
        chosen = model.model_copy(update={"device": DEVICE, "path": question.model_path})
        trainer = Trainer(path, chosen, train, ranks=ranks, max_tokens=1, files=ShapesOnly.of_config(path))
        weights = [local(one) for one in trainer.model.parameters()]
        trained = [local(one) for one in trainer._optimizer._named.values()]
        held = sum(one.numel() * one.element_size() for one in weights)
        moments = sum(8 * one.numel() for one in trained)
        trainer.keep_gradients(question.gpu_bytes)
        trainer.compute_as_gpu()
        for tokens in question.tokens:
            peak = _peak(trainer, tokens, question.row_tokens)
            gradient = sum(one.numel() * 4 for one in trained)
            yield FakeTaken(tokens, held, gradient, moments, peak - held)


def _peak(trainer: Trainer, tokens: int, row_tokens: int) -> int:
    """Most bytes during an accumulated gradient of two micro-batches, with the weights, without the moments."""
    length = max(2, min(row_tokens, tokens))
    vocabulary = trainer.model.get_input_embeddings().num_embeddings
    tracker = _Tracker()
    tracker.track_external(trainer.model)
    with tracker:
        rows = [row(length, vocabulary, number) for number in range(max(1, tokens // length))]
        batch = trainer.micro_batch(RowBatch(tuple(rows), (1.0,) * len(rows)))
        both = Minibatch((batch, batch), informative=True, tokens=tokens, skipped_tokens=0)
        trainer.accumulate(both, StepTotals(DEVICE), Moment(), fresh=True)
    trainer._optimizer.clear_gradient()
    return int(max(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values()))


def main() -> None:
    """Answers one question."""
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=FakeQuestion)
    for taken in measured(question):
        sys.stdout.buffer.write(msgspec.json.encode(taken) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
