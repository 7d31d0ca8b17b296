"""Models in training by name: a run's model, or adapters of several clients on one base model.

Gradients of `accumulate` add up until `update`, model by model; models on one base share forward and backward passes.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.errors import TrainerError
from shoal.files import replaced
from shoal.model.file_sizes import longest_row
from shoal.model.loading import DTYPES, load_model, resolve_device
from shoal.model.packed import target_logprobs
from shoal.trainer.adapters import CONFIG_FILE, SOLE, WEIGHTS_FILE, Adapters, layers_of_kind, merged_tensors
from shoal.trainer.datum_loss import LOSSES
from shoal.trainer.messages import RUN, Adam, Datum, Gradient, GradientDone, Open, TrainerFailed
from shoal.trainer.optim import Optimizer
from shoal.trainer.ranks import ALONE, Ranks, like
from shoal.trainer.row_files import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    LaterFiles,
    RowLayout,
    Rows,
    VersionRows,
    ranges_here,
    read_rows,
    rows_of,
    write_rows,
)
from shoal.types import seed_for

MOST_TOKENS = 8192
"""Tokens of one forward pass; more data takes several."""


class TrainedModel:
    """A model in training: its weights or an adapter, their optimizer, and the files of both.

    All ranks make each call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapters: Adapters | None,
        train: TrainConfig,
        dtype: torch.dtype,
        *,
        owner: int = SOLE,
        critic: dict[str, nn.Parameter] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """With `adapters` only the owner's adapter is trained. `critic` adds parameters to the model's.

        Written Versions have the `dtype`.
        """
        self.model, self.adapters, self.owner = model, adapters, owner
        trained = dict(model.named_parameters()) if adapters is None else adapters.parameters(owner)
        self._longest = longest_row(model.config.get_text_config()) or sys.maxsize
        self._critic = critic or {}
        self._dtype, self._ranks = dtype, ranks
        self._optimizer = Optimizer(trained, train, self._critic)
        self._later = LaterFiles()
        self._version: VersionRows | None = None

    @property
    def updates(self) -> int:
        """Number of optimizer updates taken."""
        return self._optimizer.updates

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of the trained parameters."""
        return self._optimizer

    @property
    def rank_count(self) -> int:
        """Ranks that hold the model."""
        return self._ranks.count

    def tensors(self) -> dict[str, Tensor]:
        """Weights by name, float32, tied ones once, sharded with several ranks; adapters are merged."""
        return merged_tensors(self.model, self.adapters, self.owner)

    def write_weights(self, path: Path, *, later: bool = False) -> None:
        """Writes the weights, in the dtype of the config, as safetensors. Raises `TrainerError`.

        For `later` it copies them, and `written` tells when the file is there. Each rank writes the rows that it has:
        the file is whole when all have written theirs, and appears whole with one.

        Tensors have the names of the architecture's checkpoints, such as one for each expert. Adapters are merged into
        the weights. A path with the name of an adapter's file gets the adapters, and its folder their settings.
        """
        if path.name == WEIGHTS_FILE and self.adapters is not None:
            adapter, settings = self.adapters.files(self.owner)
            self._write(path, RowLayout.of(adapter), rows_of(adapter, self._ranks), later=later)
            if self._ranks.first:
                path.with_name(CONFIG_FILE).write_text(settings)
            return
        weights = self.tensors()
        self._version = self._version or VersionRows.of(self.model, weights, self._dtype)
        rows = self._version.rows(weights, self._dtype, self._ranks)
        self._write(path, self._version.layout, rows, later=later)

    def _write(self, path: Path, layout: RowLayout, rows: Iterable[Rows], *, later: bool = False) -> None:
        """Writes this rank's rows; a rank alone gives the file its name once it is whole."""
        if later:
            copies = [one.copied() for one in rows]
            self._later.add(path.parent, lambda: self._write(path, layout, copies))
            return
        try:
            with replaced(path) if self._ranks.count == 1 else nullcontext(path) as unfinished:
                write_rows(unfinished, layout, rows, self._ranks)
        except OSError as error:
            raise TrainerError(f"{path}: cannot be written: {error}") from error

    def count_push(self) -> None:
        """Records a push of the weights to the engines; resets the optimizer if the config says so."""
        self._optimizer.count_push()

    def save(self, directory: Path, *, later: bool = False) -> None:
        """Writes float32 weights, moments and counters into an existing directory, readable by any number of ranks.

        For `later` it copies them, and `written` tells when the files are there. Raises `TrainerError`.
        """
        parts = {
            directory / name: (RowLayout.of(tensors), rows_of(tensors, self._ranks))
            for name, tensors in ((MODEL_FILE, self._trained()), (OPTIMIZER_FILE, self._optimizer.state()))
        }
        if later:
            copies = {path: (layout, [one.copied() for one in rows]) for path, (layout, rows) in parts.items()}
            self._later.add(directory, lambda: self._write_all(copies))
        else:
            self._write_all(parts)

    def _write_all(self, parts: Mapping[Path, tuple[RowLayout, Iterable[Rows]]]) -> None:
        for path, (layout, rows) in parts.items():
            write_rows(path, layout, rows, self._ranks)

    def written(self, directory: Path) -> Future[None]:
        """Done when the files that were to be written later into a directory are there; fails with `TrainerError`."""
        return self._later.written(directory)

    def ranges(self, directory: Path, *, optimizer: bool) -> dict[str, tuple[tuple[int, int], ...]]:
        """Offset and size of each range that `load` reads here, by file; the files may have their headers only."""
        alike = {MODEL_FILE: self._trained(), **({OPTIMIZER_FILE: self._optimizer.places()} if optimizer else {})}
        return {name: ranges_here(directory / name, tensors) for name, tensors in alike.items()}

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        """Loads the files that `save` wrote; without `optimizer` moments and counters start from zero.

        Raises `TrainerError` when they are missing or of another model.
        """
        own = self._trained()
        weights = read_rows(directory / MODEL_FILE, own)
        state = read_rows(directory / OPTIMIZER_FILE, self._optimizer.places()) if optimizer else None
        if {name: one.shape for name, one in weights.items()} != {name: one.shape for name, one in own.items()}:
            raise TrainerError(f"{directory / MODEL_FILE}: expected the tensors of this model, got other ones")
        self._optimizer.reset() if state is None else self._optimizer.load_state(state)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(like(weights[name], tensor))
        self._optimizer.clear_gradient()

    def update(self, adam: Adam) -> float:
        """Takes one AdamW update with the accumulated gradient, and clears that; returns its norm before clipping.

        Raises `TrainerError` where a weight or a moment would not be finite; then only the gradient changes.
        """
        norm, taken = self._optimizer.update_as(adam)
        if not taken:
            raise TrainerError(
                f"optim_step: a weight would not be finite (gradient's norm {norm:g}, learning_rate "
                f"{adam.learning_rate:g}); no weight was changed, and the gradient is cleared"
            )
        return norm

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Raises `TrainerError` for token ids that the model does not have."""
        vocabulary, low, high = self.model.get_input_embeddings().num_embeddings, min(ids), max(ids)
        if low < 0 or high >= vocabulary:
            raise TrainerError(f"{name}: expected ids in 0..{vocabulary - 1}, got {low}..{high}")

    def check_row(self, name: str, tokens: Sequence[int]) -> None:
        """Raises `TrainerError` for a row that the model would answer with an index error or with nonsense."""
        self.check_ids(name, tokens)
        if len(tokens) > self._longest:
            raise TrainerError(f"{name}: expected 1 to {self._longest} tokens, got {len(tokens)}")

    def _trained(self) -> dict[str, Tensor]:
        """Trained tensors that no other file holds: the weights or the adapter, and the critic."""
        weights = self.tensors() if self.adapters is None else self.adapters.parameters(self.owner)
        return {name: tensor.detach() for name, tensor in {**weights, **self._critic}.items()}


class TrainedModels:
    """Models by name; adapters of one base share its weights."""

    def __init__(self) -> None:
        self._models: dict[str, TrainedModel] = {}
        self._shared: dict[tuple[str, str], Adapters] = {}
        self._owners = count(SOLE + 1)

    def __getitem__(self, name: str) -> TrainedModel:
        """The model of a name. Raises `TrainerError`."""
        if name in self._models:
            return self._models[name]
        if name == RUN:
            raise TrainerError("expected StartTrainer as the first request")
        raise TrainerError(f"model_id: {name} is not open; it was unloaded, or its creation failed")

    def add(self, name: str, trained: TrainedModel) -> None:
        """Adds a model, in place of one of the same name."""
        self._models[name] = trained

    def open(self, request: Open) -> None:
        """Starts training of an adapter. Raises `ModelError` and `TrainerError`."""
        config, adapter = ModelConfig.model_validate_json(request.model_json), request.adapter
        key, owner = (request.model_path, request.model_json), next(self._owners)
        adapters = self._shared.get(key) or Adapters(
            load_model(request.model_path, device=resolve_device(config.device))
        )
        self._shared[key] = adapters
        layers = layers_of_kind(adapters.model, attention=adapter.attention, mlp=adapter.mlp)
        seed = seed_for("lora", adapter.seed)
        adapters.add(owner, layers, rank=adapter.rank, alpha=adapter.alpha, seed=seed)
        dtype = DTYPES[config.dtype]
        self._models[request.name] = TrainedModel(adapters.model, adapters, TrainConfig(), dtype, owner=owner)

    def close(self, name: str) -> None:
        """Forgets a model, if it was opened."""
        trained = self._models.pop(name, None)
        if trained is not None and trained.adapters is not None:
            trained.adapters.remove(trained.owner)

    def write_weights(self, name: str, path: Path, *, later: bool = False) -> None:
        """Writes what an engine loads: an adapter, or the whole weights where engines serve no adapter of the kind."""
        trained = self[name]
        whole = trained.adapters is None or trained.adapters.of_experts(trained.owner)
        other = name != RUN and path.name == WEIGHTS_FILE and whole
        trained.write_weights(path.with_name(MODEL_FILE) if other else path, later=later)

    def accumulate(self, jobs: Sequence[Gradient]) -> list[GradientDone | TrainerFailed]:
        """Adds the gradient of each job to its model; gives its logprobs and loss, or why the job is wrong."""
        results: list[GradientDone | TrainerFailed] = []
        for job in jobs:
            try:
                _check(self[job.name], job.data)
                results.append(GradientDone((), 0.0, self[job.name].updates))
            except TrainerError as error:
                results.append(TrainerFailed(str(error), refused=True))
        groups: dict[tuple[int, bool, int], list[tuple[int, Datum]]] = {}
        for number, (job, result) in enumerate(zip(jobs, results, strict=True)):
            if isinstance(result, GradientDone):
                trained = self[job.name]
                alone = trained.adapters is not None and trained.adapters.needs_own_pass(trained.owner)
                key = id(trained.model), job.backward, trained.owner if alone else SOLE
                groups.setdefault(key, []).extend((number, datum) for datum in job.data)
        found: dict[int, list[tuple[bytes, float]]] = {number: [] for number in range(len(jobs))}
        for (_, backward, _), data in groups.items():
            with torch.set_grad_enabled(backward):
                for part in _parts(data):
                    self._pass(jobs, part, found, backward=backward)
        return [
            GradientDone(tuple(logp for logp, _ in found[number]), sum(loss for _, loss in found[number]), one.updates)
            if isinstance(one, GradientDone)
            else one
            for number, one in enumerate(results)
        ]

    def _pass(
        self,
        jobs: Sequence[Gradient],
        part: Sequence[tuple[int, Datum]],
        found: dict[int, list[tuple[bytes, float]]],
        *,
        backward: bool,
    ) -> None:
        """Computes one forward pass, and its backward pass; adds logprobs and loss of each datum to `found`."""
        models = [self[jobs[number].name] for number, _ in part]
        logps = target_logprobs(
            models[0].model,
            [datum.token_ids for _, datum in part],
            [_tensor(datum, datum.targets, np.int32).long() for _, datum in part],
            apart=[trained.owner for trained in models],
            on_nodes=None if models[0].adapters is None else models[0].adapters.lay,
        )
        losses = []
        for logp, (number, datum) in zip(logps, part, strict=True):
            function, names, _ = LOSSES[jobs[number].loss]
            inputs = {name: _tensor(datum, datum.inputs[name], np.float32).to(logp.device) for name in names}
            losses.append(function(logp, inputs, jobs[number].settings))
        if backward:
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        for (number, _), logp, loss in zip(part, logps, losses, strict=True):
            found[number].append((logp.detach().float().numpy(force=True).tobytes(), float(loss.detach())))


def _check(model: TrainedModel, data: Sequence[Datum]) -> None:
    """Raises `TrainerError`, naming the datum and its field."""
    for number, datum in enumerate(data):
        model.check_row(f"data[{number}].model_input", datum.token_ids)
        model.check_ids(f"data[{number}].target_tokens", np.frombuffer(datum.targets, np.int32).tolist())


def _tensor(datum: Datum, data: bytes, kind: type[np.generic]) -> Tensor:
    """Tensor [N] or [N, K] of a datum."""
    return torch.from_numpy(np.frombuffer(data, kind).copy()).reshape(datum.shape)


def _parts(data: Sequence[tuple[int, Datum]]) -> Iterator[list[tuple[int, Datum]]]:
    """Data of several jobs in runs of at most `MOST_TOKENS` tokens and one number of targets."""
    part: list[tuple[int, Datum]] = []
    for number, datum in data:
        wide = part and datum.shape[1:] != part[0][1].shape[1:]
        if part and (wide or sum(d.shape[0] for _, d in part) + datum.shape[0] > MOST_TOKENS):
            yield part
            part = []
        part.append((number, datum))
    if part:
        yield part
