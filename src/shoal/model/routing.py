"""Routing of tokens to experts, recorded where tokens are sampled and replayed where they are trained (R3).

An engine and a trainer round differently, so that now and then a token goes to another expert in each, and its logprob
jumps. Replayed, the experts of each token are those that sampled; the router computes their weights again, so it
gets its gradient. Source: Rollout Routing Replay (arXiv 2510.11370).
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from shoal.errors import ConfigError

STORED = (torch.uint8, torch.uint16, torch.uint32)
_made: "WeakKeyDictionary[PreTrainedModel, Routing]" = WeakKeyDictionary()


class Routing:
    """Experts of the tokens of one forward, in every router of a model.

    They are stored as B = routers * k numbers for each token, in bytes: one, two or four (little-endian) for a number,
    whichever holds one more than the number of experts. They stay until the next forward, because checkpointed layers
    route again in the backward pass.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Requires a model with routers (`routers_of`)."""
        routers = routers_of(model)
        _made[model] = self
        most = max(len(cast(Tensor, router.weight)) for router in routers)
        self.dtype = next(one for one in STORED if torch.iinfo(one).max >= most)
        """Numbers that are stored."""
        self.given_TE: Tensor | None = None
        """Experts to use, and -1 where they were not recorded; None leaves the choice to the routers."""
        self._found: dict[int, Tensor] = {}
        for index, router in enumerate(routers):
            router.forward = partial(self._route, index, router.forward)

    def found(self) -> Tensor:
        """Experts of the latest forward as they are stored, uint8 [T, B]."""
        return torch.cat([self._found[index] for index in sorted(self._found)], -1).to(self.dtype).view(torch.uint8)

    def read(self, stored_TB: Tensor) -> Tensor:
        """Experts [T, routers * k] as numbers, -1 where they were not recorded."""
        stored_TE = stored_TB.view(self.dtype).long()
        return stored_TE.masked_fill_(stored_TE == torch.iinfo(self.dtype).max, -1)

    def _route(self, index: int, forward: Callable[..., Any], *arguments: Tensor, **named: Tensor) -> Any:
        with _TopK(self.given_TE, index) as chosen:
            outputs = forward(*arguments, **named)
        assert chosen.found is not None, "a router chooses its experts by torch.topk"
        self._found[index] = chosen.found
        return outputs


def replay_routing(model: PreTrainedModel) -> None:
    """Has the forwards of a model use given experts. Raises `ConfigError` for a model without routers."""
    if not routers_of(model):
        kind = model.config.model_type
        raise ConfigError(f"train.router_replay: expected a mixture of experts with top-k routers, got {kind!r}")
    Routing(model)


def routing_of(model: PreTrainedModel) -> Routing | None:
    """Routing of a model that `Routing` was made for."""
    return _made.get(model)


def routers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Routers of a mixture of experts, layer by layer; none in a dense model."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


class _TopK(TorchFunctionMode):
    """Gives the calls of `torch.topk` inside the recorded experts of one router."""

    def __init__(self, given_TE: Tensor | None, index: int) -> None:
        super().__init__()
        self._given_TE, self._index = given_TE, index
        self.found: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        values_Tk, index_Tk = result
        k = index_Tk.shape[-1]
        if self._given_TE is not None:
            given_Tk = self._given_TE[:, self._index * k : (self._index + 1) * k]
            index_Tk = torch.where(given_Tk < 0, index_Tk, given_Tk)
            values_Tk = args[0].gather(-1, index_Tk)
        self.found = index_Tk
        return torch.return_types.topk((values_Tk, index_Tk))
