"""One rank of many, alone: torch's fake tensors have shapes and no numbers, and its fake group sends nothing.

The trainer itself runs in it, so what it makes is what a real rank would make: sizes, dtypes, placements, collectives.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.model.checkpoint_names import checkpoint_tensors
from shoal.model.loading import empty_model
from shoal.trainer.ranks import Ranks, leave


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
