"""Each rank's rows of a Version's file, under the checkpoint's names.

transformers packs experts into one tensor, [E, ...], whose rows are experts. A rank splits its experts and numbers
them from its first one. Tensors that a checkpoint joins or cuts otherwise are gathered by the first rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.model.checkpoint_names import checkpoint_tensors
from shoal.trainer.ranks import Ranks
from shoal.trainer.row_files import RowLayout, Rows, rows_of


@dataclass(frozen=True, slots=True)
class VersionRows:
    """How a model's tensors lie in the file of a Version."""

    layout: RowLayout
    model: PreTrainedModel
    names: Mapping[str, tuple[str, ...]]
    """Checkpoint names of a tensor: one, or one per expert."""

    @classmethod
    def of(cls, model: PreTrainedModel, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> "VersionRows":
        """RowLayout of the model's tensors, of which only dtype and shape are read; numbers become `dtype`."""
        empty = {name: _empty(one, dtype) for name, one in tensors.items()}
        whole = checkpoint_tensors(model, empty)
        names = {name: found for name, one in empty.items() if (found := _names(model, name, one, whole))}
        return cls(RowLayout.of(whole), model, names)

    def rows(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, ranks: Ranks) -> Iterator[Rows]:
        """Rows that this rank writes. All ranks exhaust it, in the same order."""
        apart = {name: one for name, one in tensors.items() if name in self.names}
        for one in rows_of(apart, ranks):
            values, names = _cast(one.values, dtype), self.names[one.name]
            if len(names) == 1:
                yield Rows(names[0], one.first, values)
                continue
            experts, of_all = len(values), int(tensors[one.name].shape[0])
            for index, split in enumerate(checkpoint_tensors(self.model, {one.name: values}).values()):
                kind, expert = divmod(index, experts)
                yield Rows(names[kind * of_all + one.first + expert], 0, split)
        joint = ranks.gather({name: one for name, one in tensors.items() if name not in self.names})
        for name, whole in checkpoint_tensors(self.model, joint).items() if joint else ():
            yield Rows(name, 0, _cast(whole, dtype))


def _names(model: PreTrainedModel, name: str, tensor: Tensor, whole: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of a tensor in the checkpoint, or of each of its rows, if it has nothing to do with other tensors."""
    try:
        found = checkpoint_tensors(model, {name: tensor})
        of_one = checkpoint_tensors(model, {name: tensor[:1]}) if len(found) > 1 else {}
    except (RuntimeError, ValueError, KeyError, AttributeError):  # it is made of several
        return ()
    if any(key not in whole or whole[key].shape != one.shape for key, one in found.items()):
        return ()
    names = tuple(found)
    if len(names) == 1:  # the tensor keeps its name: a converter would have made another tensor
        return names if found[names[0]] is tensor else ()
    by_row = all(one.ndim == tensor.ndim - 1 for one in found.values()) and names[:: len(tensor)] == tuple(of_one)
    return names if by_row else ()


def _empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="meta")


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
