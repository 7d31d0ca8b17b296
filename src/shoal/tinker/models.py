"""Models in training: adapters of several clients on one base model, and full copies; Adam for each.

Gradients of `forward_backward` calls add up until `optim_step`, as the Tinker API defines it.
"""

import copy
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.engine.adapters import FILE, SETTINGS
from shoal.errors import ModelError, RequestRefused
from shoal.model.loading import load_model
from shoal.model.packed import target_logprobs
from shoal.tinker.adapters import Adapters
from shoal.tinker.data import Datum
from shoal.tinker.losses import Settings, loss_sum
from shoal.tinker.messages import Adam, Adapter

MOST_TOKENS = 8192
"""Tokens of one forward pass; more data takes several."""
WEIGHTS, MOMENTS = "weights.safetensors", "moments.safetensors"


@dataclass
class TrainedModel:
    """One client's model: its parameters, their gradients, and Adam's moments."""

    model: PreTrainedModel
    adapters: Adapters | None
    """Adapters on the model that the client shares; None for a full copy."""
    owner: int
    parameters: dict[str, nn.Parameter]
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    """Number of optimizer steps, which is the Version of its tokens."""


@dataclass(frozen=True)
class GradientJob:
    """One client's checked data for a forward pass, and for a backward pass if `backward`."""

    model_id: str
    data: list[Datum]
    loss: str
    settings: Settings
    backward: bool


class TrainedModels:
    """Base models by name, and trained models by id."""

    def __init__(self, bases: Mapping[str, Path], dtype: str = "float32", device: str = "cpu") -> None:
        self._paths = dict(bases)
        self._dtype, self._device = dtype, device
        self._bases: dict[str, Adapters] = {}
        self._trained: dict[str, TrainedModel] = {}
        self._owners = count()

    def open(self, model_id: str, base: str, adapter: Adapter | None) -> None:
        """Starts training of an adapter, or of all weights. Raises `ModelError` and `RequestRefused`."""
        if base not in self._paths:
            raise RequestRefused(f"base_model: expected one of {', '.join(self._paths)}; got {base!r}")
        owner = next(self._owners)
        if adapter is None:
            model = self._loaded(base)
            self._trained[model_id] = TrainedModel(model, None, owner, dict(model.named_parameters()))
            return
        if base not in self._bases:
            self._bases[base] = Adapters(self._loaded(base))
        adapters = self._bases[base]
        self._trained[model_id] = TrainedModel(adapters.model, adapters, owner, adapters.add(owner, adapter))

    def _loaded(self, base: str) -> PreTrainedModel:
        return load_model(self._paths[base], dtype=self._dtype, device=self._device)

    def close(self, model_id: str) -> None:
        """Forgets a model, if it was opened."""
        trained = self._trained.pop(model_id, None)
        if trained is not None and trained.adapters is not None:
            trained.adapters.remove(trained.owner)

    def forward_backward(self, jobs: Sequence[GradientJob]) -> list[tuple[list[Tensor], list[float]]]:
        """Logprobs of each job's targets, datum by datum, and their losses; a backward job adds its gradient.

        Jobs of clients that share a base model are computed together.
        """
        results: list[tuple[list[Tensor], list[float]]] = [([], []) for _ in jobs]
        groups: dict[tuple[int, bool], list[tuple[int, Datum]]] = {}
        for number, job in enumerate(jobs):
            model = self._trained[job.model_id].model
            groups.setdefault((id(model), job.backward), []).extend((number, datum) for datum in job.data)
        for (_, backward), data in groups.items():
            with torch.set_grad_enabled(backward):
                for part in _parts(data):
                    self._pass(jobs, part, results, backward=backward)
        return results

    def _pass(
        self,
        jobs: Sequence[GradientJob],
        part: Sequence[tuple[int, Datum]],
        results: list[tuple[list[Tensor], list[float]]],
        *,
        backward: bool,
    ) -> None:
        """Computes one forward pass, and its backward pass; adds to the results of each job."""
        owners = [self._trained[jobs[number].model_id] for number, _ in part]
        shared = owners[0].adapters
        logps = target_logprobs(
            owners[0].model,
            [datum.tokens for _, datum in part],
            [datum.targets for _, datum in part],
            apart=[trained.owner for trained in owners],
            on_nodes=None if shared is None else shared.lay,
        )
        sums = [
            loss_sum(jobs[number].loss, logp, datum.inputs, jobs[number].settings)
            for logp, (number, datum) in zip(logps, part, strict=True)
        ]
        if backward:
            torch.stack(sums).sum().backward()  # type: ignore[no-untyped-call]
        for (number, _), logp, value in zip(part, logps, sums, strict=True):
            results[number][0].append(logp.detach())
            results[number][1].append(float(value.detach()))

    @torch.no_grad()
    def optim_step(self, model_id: str, adam: Adam) -> dict[str, float]:
        """Takes one AdamW step with the gradients summed so far, and clears them; returns its metrics.

        Raises `RequestRefused` where a weight or a moment would not be finite; then only the gradient changes. So the
        step is computed twice: copies of all weights would need more memory.
        """
        trained = self._of(model_id)
        grads = {name: p.grad for name, p in trained.parameters.items() if p.grad is not None}
        for parameter in trained.parameters.values():
            parameter.grad = None
        norms = [torch.linalg.vector_norm(grad) for grad in grads.values()]
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        scale = min(1.0, adam.grad_clip_norm / norm) if adam.grad_clip_norm > 0 and norm > 0 else 1.0
        if not math.isfinite(norm) or not all(_finite(step) for _, step in _adam_steps(trained, grads, scale, adam)):
            raise RequestRefused(
                f"optim_step: a weight would not be finite (gradient's norm {norm:g}, learning_rate "
                f"{adam.learning_rate:g}); no weight was changed, and the gradient is cleared"
            )
        for name, (first, second, weight) in _adam_steps(trained, grads, scale, adam):
            trained.first[name], trained.second[name] = first, second
            trained.parameters[name].copy_(weight)
        trained.steps += 1
        return {"unclipped_grad_l2:mean": norm, "learning_rate": adam.learning_rate, "version": float(trained.steps)}

    def bounds(self, model_id: str) -> tuple[int, int]:
        """Number of token ids of a model, and of the tokens that a row may have."""
        model = self._of(model_id).model
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        return int(model.get_input_embeddings().num_embeddings), longest or sys.maxsize

    def steps(self, model_id: str) -> int:
        """Number of optimizer steps of a model."""
        return self._of(model_id).steps

    def _of(self, model_id: str) -> TrainedModel:
        if model_id not in self._trained:
            raise RequestRefused(f"model_id: {model_id} is not open; it was unloaded, or its creation failed")
        return self._trained[model_id]

    def save(self, model_id: str, folder: Path) -> None:
        """Writes parameters and Adam's moments into a folder."""
        trained = self._of(model_id)
        save_file(_plain(trained.parameters), folder / WEIGHTS)
        moments = {f"first.{k}": v for k, v in trained.first.items()} | {
            f"second.{k}": v for k, v in trained.second.items()
        }
        save_file(moments, folder / MOMENTS, {"steps": str(trained.steps)})

    @torch.no_grad()
    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Loads what `save` wrote, without Adam's moments unless `optimizer`. Raises `ModelError`."""
        trained = self._of(model_id)
        try:
            found = load_file(folder / WEIGHTS)
            moments = load_file(folder / MOMENTS, str(self._device)) if optimizer else {}
            steps = _steps(folder / MOMENTS) if optimizer else 0
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{folder.name}: expected the weights of a checkpoint that was not removed: {error}"
            ) from None
        if {k: v.shape for k, v in found.items()} != {k: v.shape for k, v in trained.parameters.items()}:
            raise ModelError(f"{folder.name}: expected the same base model and adapter settings as the model's")
        for name, parameter in trained.parameters.items():
            parameter.copy_(found[name])
            parameter.grad = None
        trained.first = {k.removeprefix("first."): v for k, v in moments.items() if k.startswith("first.")}
        trained.second = {k.removeprefix("second."): v for k, v in moments.items() if k.startswith("second.")}
        trained.steps = steps

    @torch.no_grad()
    def write_served(self, model_id: str, folder: Path) -> None:
        """Writes what an engine loads: an adapter where engines serve it beside its base, else the merged weights."""
        trained = self._of(model_id)
        if trained.adapters is not None and trained.adapters.served_apart(trained.owner):
            adapter, settings = trained.adapters.files(trained.owner)
            save_file({name: tensor.contiguous() for name, tensor in adapter.items()}, folder / FILE)
            (folder / SETTINGS).write_text(json.dumps(settings, indent=1))
            return
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in trained.model.state_dict(keep_vars=True).items():
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            layer = name.removesuffix(".weight")
            delta = None if trained.adapters is None else trained.adapters.merged(trained.owner, layer)
            tensors[name] = (tensor.detach() if delta is None else tensor + delta.to(tensor.dtype)).contiguous()
        save_file(tensors, folder / "model.safetensors")


def _parts(data: Sequence[tuple[int, Datum]]) -> Iterator[list[tuple[int, Datum]]]:
    """Data of several jobs in runs of at most `MOST_TOKENS` tokens and one number of targets."""
    part: list[tuple[int, Datum]] = []
    for number, datum in data:
        wide = part and datum.targets.shape[1:] != part[0][1].targets.shape[1:]
        if part and (wide or sum(len(d.tokens) for _, d in part) + len(datum.tokens) > MOST_TOKENS):
            yield part
            part = []
        part.append((number, datum))
    if part:
        yield part


AdamStep: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""First and second moment of a parameter after a step, float32, and its weight."""


def _adam_steps(
    trained: TrainedModel, grads: Mapping[str, Tensor], scale: float, adam: Adam
) -> Iterator[tuple[str, AdamStep]]:
    """One AdamW step of each parameter, which changes nothing yet. Source: AdamW (arXiv 1711.05101)."""
    steps = trained.steps + 1
    for name, parameter in trained.parameters.items():
        nothing = torch.zeros_like(parameter, dtype=torch.float32)
        grad = grads[name].float() * scale if name in grads else nothing
        first = trained.first.get(name, nothing).lerp(grad, 1 - adam.beta1)
        second = (trained.second.get(name, nothing) * adam.beta2).addcmul_(grad, grad, value=1 - adam.beta2)
        mean = first / (1 - adam.beta1**steps)
        deviation = (second / (1 - adam.beta2**steps)).sqrt()
        change = (adam.learning_rate * mean / (deviation + adam.eps)).to(parameter.dtype)
        yield name, (first, second, parameter * (1 - adam.learning_rate * adam.weight_decay) - change)


def _finite(tensors: AdamStep) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _plain(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: copy.deepcopy(p.detach()).contiguous() for name, p in parameters.items()}


def _steps(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        return int(file.metadata()["steps"])
