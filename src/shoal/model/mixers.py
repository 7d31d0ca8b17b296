"""Modules that mix the tokens of a row without a `Layout`: recurrences, convolutions, and attention to indexed keys.

transformers' modules compute them. Each of their calls gets whole rows, or the next tokens of rows with the state that
these rows carry, because their code for CPUs ignores the bounds of packed rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from inspect import signature, unwrap
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicIndexedLayer, LinearAttentionLayer

from shoal.model.attention import Scores

STATEFUL = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache"})
"""Methods of transformers' caches by which a module keeps a state of fixed size."""
CACHES = ("cache_params", "past_key_values")
"""Names of the argument that takes a cache."""
MOST_STATES = 8
"""States of a kind that one layer has at most."""
KINDS = ("conv_states", "recurrent_states")
Run: TypeAlias = "Callable[[Sequence[Tensor], RowState | None], tuple[Tensor, ...]]"
"""Computes rows [R, L, ...] of the inputs, and carries their state on if one is given: outputs [R, L, ...]."""


class Layout(Protocol):
    """Attention pattern of the T tokens of one forward."""

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scores: Scores) -> Tensor:
        """Attends in one layer, with H query heads and K key-value heads; the result is [T, H, D]."""
        ...

    def mix(self, mixer: "Mixer", inputs_T: Sequence[Tensor], run: Run) -> Sequence[Tensor]:
        """Mixes the tokens of each row by `run`, from and to tensors [T, ...]."""
        ...


class RowState(Cache):  # type: ignore[misc]
    """State of one mixer after some tokens of R rows, as transformers' modules read and write it.

    It has a fixed size for each row, unless the mixer attends to indexed keys: then it grows, and R is 1.
    """

    def __init__(self, mixer: "Mixer") -> None:
        self.own: Any = DynamicIndexedLayer() if mixer.grows else LinearAttentionLayer(MOST_STATES)
        super().__init__(layers=[self.own] * (mixer.layer + 1))

    def get_linear_cache(self, _: int) -> Tensor | None:
        """State of MiniMax's layers, by their names of the methods."""
        state: Tensor | None = self.own.recurrent_states[0]
        return state

    def set_linear_cache(self, _: int, state: Tensor) -> None:
        """Sets the state of MiniMax's layers."""
        self.own.recurrent_states[0] = state

    @property
    def is_begun(self) -> bool:
        """Whether it stands for some tokens."""
        return any(self.own.has_previous_state.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        values = vars(self.own).values()
        nested = [*values, *(one for value in values if isinstance(value, dict) for one in value.values())]
        return sum(one.nbytes for one in nested if isinstance(one, Tensor))

    @staticmethod
    def joined(parts: Sequence[tuple["RowState", int]]) -> "RowState":
        """Copy of some rows of states of one mixer, as one state."""
        whole = copy(parts[0][0])
        whole.own = copy(whole.own)
        for kind in KINDS:
            of_kind = {}
            for index, first in getattr(whole.own, kind).items():
                rows = [getattr(state.own, kind)[index] for state, _ in parts]
                of_kind[index] = (
                    None
                    if first is None
                    else torch.cat([x[row : row + 1] for x, (_, row) in zip(rows, parts, strict=True)])
                )
            setattr(whole.own, kind, of_kind)
        whole.layers = [whole.own] * len(whole.layers)
        return whole


class Mixer:
    """One module that mixes tokens, and the cut of its arguments into rows."""

    def __init__(self, module: nn.Module, forwards: "Forwards") -> None:
        self.layer = cast(int, module.layer_idx)
        self.grows = hasattr(module, "indexer")
        """Whether its state grows with each token."""
        names = _names(module)
        self._steps = "update_recurrent_state" in names and not names & {"initial_state", "initial_states"}
        """Whether the module begins several tokens without their state (Mamba 1): then each continues it alone."""
        self._least = _LeastStep(module) if getattr(module, "time_step_limit", (0.0,))[0] > 0 else None
        self._forward = module.forward
        self._cache = next(name for name in CACHES if name in signature(module.forward).parameters)
        self._forwards = forwards

    def __call__(self, *arguments: Any, layout: Layout | None = None, **named: Any) -> Any:
        """Output of transformers' module for the tokens [1, T, ...] of a forward."""
        layout = layout or self._forwards.layout
        if layout is None:
            return self._forward(*arguments, **named)
        leaves, form = tree_flatten((arguments, named))
        tokens = next(one.shape[1] for one in leaves if isinstance(one, Tensor))
        at = [i for i, one in enumerate(leaves) if isinstance(one, Tensor) and one.shape[:2] == (1, tokens)]
        are_kept: list[bool] = []

        def run(rows: Sequence[Tensor], state: RowState | None) -> tuple[Tensor, ...]:
            if self._steps and state is not None and state.is_begun and rows[0].shape[1] > 1:
                each = [run([row[:, t : t + 1] for row in rows], state) for t in range(rows[0].shape[1])]
                return tuple(torch.cat(steps, 1) for steps in zip(*each, strict=True))
            keys = rows[0].shape[1] + (0 if state is None or not self.grows else state.own.get_seq_length())
            for i, row in zip(at, rows, strict=True):
                # Chosen keys of a shared beginning may lie after the end of this row; the causal mask hides the last.
                leaves[i] = row if row.is_floating_point() or not self.grows else row.clamp(max=keys - 1)
            given, by_name = tree_unflatten(leaves, form)
            by_name[self._cache] = state
            if self._least is not None:
                self._least.come_last()
            if self.grows:
                by_name["attention_mask"] = _causal(rows[0], 0 if state is None else state.own.get_seq_length())
            found = self._forward(*given, **by_name)
            outputs = found if isinstance(found, tuple) else (found,)
            # Other numbers than hidden states [R, L, W] are probabilities or states, and have no row for each token.
            others = outputs[0].ndim > 3
            are_kept[:] = [
                isinstance(one, Tensor) and (i == 0 or others or not one.is_floating_point())
                for i, one in enumerate(outputs)
            ]
            return tuple(one for one, kept in zip(outputs, are_kept, strict=True) if kept)

        mixed = iter(layout.mix(self, [leaves[i][0] for i in at], run))
        outputs = [next(mixed)[None] if kept else None for kept in are_kept]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


class _LeastStep:
    """Bounds the steps of a Mamba 2 module from below, as its code for many tokens does and its code for one does not.

    It hooks the projection that gives the steps, after the hooks of adapters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._projection = module, cast(nn.Module, module.in_proj)
        self._least = math.log(math.expm1(cast(Sequence[float], module.time_step_limit)[0]))
        self._hook = self._projection.register_forward_hook(self._bounded)

    def come_last(self) -> None:
        """Moves the hook behind those that came since."""
        if next(reversed(self._projection._forward_hooks)) != self._hook.id:
            self._hook.remove()
            self._hook = self._projection.register_forward_hook(self._bounded)

    def _bounded(self, _: nn.Module, __: object, projected: Tensor) -> Tensor:
        """The projection [..., W + H], whose last H numbers are the steps before bias and softplus."""
        bias_H = cast(Tensor, self._module.dt_bias)
        rest, step = torch.split(projected, [projected.shape[-1] - len(bias_H), len(bias_H)], -1)
        return torch.cat((rest, torch.maximum(step, (self._least - bias_H).to(step.dtype))), -1)


class Forwards:
    """The forward that a model computes now, or computed last: checkpointed layers run again in the backward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Puts a `Mixer` into each module of the model that needs one."""
        self.layout: Layout | None = None
        self.position_T: Tensor | None = None
        self._shared_calls = 0
        self.mixers: dict[str, Mixer] = {}
        for name, module in model.named_modules():
            if not hasattr(module, "layer_idx"):
                continue
            module.shoal_forwards = self
            if hasattr(module, "indexer") or _names(module) & STATEFUL:
                self.mixers[name] = Mixer(module, self)
                module.forward = self.mixers[name]
            if hasattr(module, "indexer"):
                module.config = deepcopy(module.config)
                module.config._attn_implementation = "eager"
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def layer(self, module: nn.Module) -> int:
        """Number of a layer of attention; layers that share a module (Zamba) are counted."""
        if module.layer_idx is not None:
            return cast(int, module.layer_idx)
        self._shared_calls += 1
        return -self._shared_calls

    def _note(self, _: nn.Module, __: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        positions = named.get("position_ids")
        self.layout, self.position_T = named.get("layout"), None if positions is None else positions[0]
        self._shared_calls = 0


def mixers_of(model: nn.Module) -> Mapping[str, Mixer]:
    """Mixers of a loaded model by the name of their module; none where all layers attend through a `Layout`."""
    forwards = (cast("Forwards", one.shoal_forwards) for one in model.modules() if hasattr(one, "shoal_forwards"))
    return next((one.mixers for one in forwards), {})


def _names(module: nn.Module) -> set[str]:
    """Names that the methods of a module's class use, those of arguments included."""
    methods = (unwrap(one) for one in vars(type(module)).values() if callable(one))
    codes = [one.__code__ for one in methods if hasattr(one, "__code__")]
    keywords = (one for code in codes for one in code.co_consts if isinstance(one, tuple))
    return {str(name) for names in (*(code.co_names for code in codes), *keywords) for name in names}


def _causal(row: Tensor, past: int) -> Tensor:
    """Additive mask [1, 1, L, past + L] of rows [R, L, ...]: the lowest number on keys that follow the query."""
    at_L = torch.arange(past + row.shape[1], device=row.device)
    later_LK = at_L > at_L[past:, None]
    return torch.zeros(later_LK.shape, dtype=row.dtype, device=row.device).masked_fill_(
        later_LK, torch.finfo(row.dtype).min
    )[None, None]


def side_by_side(parts: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Outputs [T, ...] of rows end to end, from parts [t, ...]."""
    return [torch.cat(_as_wide(outputs)) if len(outputs) > 1 else outputs[0] for outputs in zip(*parts, strict=True)]


def _as_wide(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Indices of chosen keys may differ in number: a part with fewer repeats its first."""
    if outputs[0].is_floating_point():
        return outputs
    most = max(one.shape[-1] for one in outputs)
    return tuple(torch.cat((one, one[..., :1].expand(*one.shape[:-1], most - one.shape[-1])), -1) for one in outputs)
