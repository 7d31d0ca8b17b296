"""Low-rank adapters by name: several on the weights of one engine, each with its own Versions.

y = W x + (alpha / rank) B A x,   A [rank, in],   B [out, rank]

W stays as it is. Every row of a forward gets its request's adapter, or none, in one batch with all other
rows. Linear layers that the forward computes as one product have one joint pair of A and B. Source: LoRA (arXiv
2106.09685).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import RequestRefused

SETTINGS = "adapter_config.json"
PREFIX = "base_model.model."
Products = Mapping[str, Sequence[tuple[str, int]]]
"""Linear layers that one product computes, each with the number of its outputs, under the name of the first."""
UNSUPPORTED = ("use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save", "layer_replication")
"""Settings of peft that change what A and B mean; an adapter that uses one is refused."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedAdapter:
    """A Version of a named adapter, ready for the forward of an engine."""

    name: str
    version: int
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """A^T [in, R] and B^T [R, out] times alpha / rank for each product, under the name of its first layer."""
    serial: int = field(default_factory=count(1).__next__)


class AdaptedRows:
    """Rows of one forward that adapters change, with the indices of each adapter's rows."""

    def __init__(self, adapters_T: Sequence[NamedAdapter | None], keep_K: Tensor | None, device: torch.device) -> None:
        """`keep_K` are the rows that remain once the forward drops the others."""
        named = {id(one): one for one in adapters_T if one is not None}
        whole = len(named) == 1 and None not in adapters_T
        rows = torch.tensor([0 if one is None else id(one) for one in adapters_T], device=device)
        kept = rows if keep_K is None else rows[keep_K]
        self._of: list[tuple[NamedAdapter, Tensor | None, Tensor | None]] = [
            (one, None, None) if whole else (one, _places(rows, key), _places(kept, key)) for key, one in named.items()
        ]

    def added(self, product: str, x_TW: Tensor, y_TO: Tensor, *, kept: bool = False) -> Tensor:
        """Adds to a product `y_TO` of `x_TW`, in place, and returns it; `kept`: only the kept rows are left."""
        for adapter, rows, kept_rows in self._of:
            pair = adapter.pairs.get(product)
            if pair is None:
                continue
            at = kept_rows if kept else rows
            if at is None:
                y_TO.addmm_(x_TW @ pair[0], pair[1])
            elif len(at):
                y_TO.index_add_(0, at, (x_TW.index_select(0, at) @ pair[0]) @ pair[1])
        return y_TO


def _places(rows: Tensor, key: int) -> Tensor:
    return (rows == key).nonzero()[:, 0]


def low_rank_pairs(
    file: Path, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """A [R, in] and B [out, R] times alpha / rank by layer, float32, of an adapter in the form of peft.

    `weights` are the model's. Raises `RequestRefused` for another model's adapter.
    """
    scale = _scale(file.with_name(SETTINGS))
    layers = {key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in tensors}
    expected = {f"{PREFIX}{layer}.lora_{part}.weight" for layer in layers for part in "AB"}
    unknown = sorted(f"{layer}.weight" for layer in layers if f"{layer}.weight" not in weights)
    if tensors.keys() != expected or unknown:
        raise RequestRefused(
            f"adapter {file}: expected pairs lora_A and lora_B of this model's layers, got "
            f"{(unknown or sorted(tensors.keys() ^ expected))[0]!r}"
        )
    pairs = {}
    for layer in sorted(layers):
        a_RD, b_OR = (tensors[f"{PREFIX}{layer}.lora_{part}.weight"].float() for part in "AB")
        shape = list(weights[f"{layer}.weight"].shape)
        if [b_OR.shape[0], a_RD.shape[1]] != shape or b_OR.shape[1] != len(a_RD):
            raise RequestRefused(f"adapter {file}: {layer!r}: expected the shape {shape} of the layer")
        if not bool(a_RD.isfinite().all() and b_OR.isfinite().all()):
            raise RequestRefused(f"adapter {file}: {layer!r} holds numbers that are not finite")
        pairs[layer] = a_RD, b_OR * scale
    return pairs


def _scale(path: Path) -> float:
    """alpha / rank. Raises `RequestRefused` for settings that change the meaning of A and B."""
    try:
        settings = json.loads(path.read_bytes())
        rank = int(settings["r"])
        scale = float(settings["lora_alpha"]) / (sqrt(rank) if settings.get("use_rslora") else rank)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, AttributeError) as error:
        raise RequestRefused(f"adapter {path.parent}: {SETTINGS}: {error!r}") from error
    if unknown := [name for name in UNSUPPORTED if settings.get(name)] + (
        ["bias"] if settings.get("bias", "none") != "none" else []
    ):
        raise RequestRefused(f"adapter {path.parent}: {SETTINGS}: {unknown[0]!r} is not supported")
    return scale


def joint_pairs(
    pairs: Mapping[str, tuple[Tensor, Tensor]], products: Products, like: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs by product in the dtype and on the device of `like`, ready for `AdaptedRows`.

    Raises `RequestRefused` for a layer in no product.
    """
    known = {layer for layers in products.values() for layer, _ in layers}
    if strange := sorted(pairs.keys() - known):
        raise RequestRefused(f"adapters of {strange[0]!r} are not supported by name: load them as weights")
    joint = {}
    for product, layers in products.items():
        adapted = [layer for layer, _ in layers if layer in pairs]
        if not adapted:
            continue
        ranks = [len(pairs[layer][0]) for layer in adapted]
        b_RO = torch.zeros(sum(ranks), sum(outputs for _, outputs in layers))
        column = row = 0
        for layer, outputs in layers:
            if layer in pairs:
                b_OR = pairs[layer][1]
                b_RO[row : row + b_OR.shape[1], column : column + outputs] = b_OR.t()
                row += b_OR.shape[1]
            column += outputs
        a_WR = torch.cat([pairs[layer][0] for layer in adapted]).t().contiguous()
        joint[product] = a_WR.to(like), b_RO.to(like)
    return joint
