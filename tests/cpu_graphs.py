"""A `Capture` for machines without a GPU: like a CUDA graph, on a CPU.

A step's operations are kept with the tensors and numbers that they were given. Replaying runs the operations again
on the same tensors and puts the results where they were: no line of the step's own code runs, so that whatever it read
from elsewhere is what it was when it was captured. What a GPU could not capture is refused. It keeps all tensors alive
and knows no streams: what goes wrong with those it cannot show.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = ("_local_scalar_dense", "lift_fresh", "nonzero", "equal", "is_nonzero")
"""Operations that wait for a device, or bring numbers to it that lie somewhere else at every step."""


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in HOST:
            raise RuntimeError(f"{name} cannot be captured")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, _made(result, (args, kwargs))))
        return result


class CpuCapture:
    """Counts how many steps it captured."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        self.count += 1
        kept = _Operations()
        with kept:
            step()

        def replay() -> None:
            for func, args, kwargs, made in kept.operations:
                again = _made(func(*args, **kwargs), (args, kwargs))
                for before, now in zip(made, again, strict=True):
                    before.copy_(now)

        return replay


def _made(result: Any, given: Any) -> list[Tensor]:
    """The tensors that an operation made: not those that lie where one of the given ones does."""
    lying = {x.untyped_storage().data_ptr() for x in tree_leaves(given) if isinstance(x, Tensor)}
    tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    return [x for x in tensors if x.numel() and x.untyped_storage().data_ptr() not in lying]
