"""Memory of a run: the mesh of the trainer's ranks, a lower bound of what processes keep, and the fit to GPUs.

Mesh      copies of the weights, each sharded over some ranks. A copy for few ranks keeps its traffic inside a host; a
          copy for many leaves room for a larger model.
Bound     weights, gradients and moments, from model files and settings.
Planner   whether a step fits, and the size of a micro-batch and the checkpointing with which it does. A child process
          runs the trainer with fake tensors (`trainer.fake_run`) for two sizes of a micro-batch. What a pass adds grows
          in proportion to its tokens, so two sizes tell of every other.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import msgspec
import psutil

from shoal.config import Config
from shoal.errors import ConfigError, ModelError, expected_one_of
from shoal.model.adapter_targets import adapted_shapes
from shoal.model.file_sizes import shapes_of, sizes_of
from shoal.net.process import torch_environment
from shoal.trainer.messages import FakeQuestion, FakeTaken

STATE_BYTES = 16
"""Bytes of a trained number: weight, gradient and Adam's two moments, in float32."""
SHARE = 0.4
"""Share of a GPU's memory that weights and moments may take; the rest is for a pass."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks, of which `shard` share one copy of the weights.

    >>> print(Mesh(64, 8, 131e9))
    64 ranks: 8 copies of the weights, each over 8 ranks, 16.4 GB of weights, gradients and moments on each
    >>> print(Mesh(8, 8, 131e9))
    8 ranks: 1 copy of the weights over 8 ranks, 16.4 GB of weights, gradients and moments on each
    """

    ranks: int
    shard: int
    state_bytes: float
    """Bytes of one copy: weights, gradients and moments."""

    @property
    def per_copy(self) -> int | None:
        """Ranks of one copy; None for all."""
        return None if self.shard == self.ranks else self.shard

    def __str__(self) -> str:
        copies = self.ranks // self.shard
        how = f"{copies} copies of the weights, each" if copies > 1 else "1 copy of the weights"
        each = f"{self.state_bytes / self.shard / 1e9:.1f} GB of weights, gradients and moments on each"
        return f"{self.ranks} ranks: {how} over {self.shard} ranks, {each}"


def mesh_of(state_bytes: float, ranks: int, per_host: int, gpu_bytes: int, asked: int = 1) -> Mesh:
    """Mesh with the smallest copies, of whole hosts, that leave a pass its share of the memory; else one copy.

    `asked` is the number of ranks of a copy that the settings want; 1 leaves it open. Without GPUs, or with one to a
    host, all ranks share one copy: nothing is won by copies whose traffic crosses hosts anyway.

    >>> [mesh_of(size, 64, 8, 80 << 30).shard for size in (131e9, 525e9, 1130e9, 3760e9)]
    [8, 16, 64, 64]
    >>> mesh_of(131e9, 64, 8, 80 << 30, asked=32).shard, mesh_of(131e9, 4, 1, 0).shard
    (32, 4)
    """
    if asked > 1 or per_host < 2 or not gpu_bytes:
        return Mesh(ranks, asked if asked > 1 else ranks, state_bytes)
    sizes = (size for size in range(per_host, ranks, per_host) if ranks % size == 0)
    fits = (size for size in sizes if state_bytes / size <= SHARE * gpu_bytes)
    return Mesh(ranks, next(fits, ranks), state_bytes)


NUMBER_BYTES = {"float32": 4, "bfloat16": 2}


def trainer_mesh(config: Config, shapes: Mapping[str, list[int]], gpu_bytes: int, ranks: int | None = None) -> Mesh:
    """Mesh of the run's ranks, each with a GPU of that memory, or 0 on CPUs, for a model of these shapes.

    `ranks` have joined, if they are fewer than the configured ones.
    """
    numbers, lora, places = sum(map(prod, shapes.values())), config.train.lora, config.cluster.trainer
    adapters = sum(lora.rank * sum(shape) for shape in adapted_shapes(lora.targets, shapes)) if lora.rank else 0
    sharded = (places.ranks if places else config.train.ranks) > 1
    frozen = numbers * ((adapters > 0) + (config.train.kl.coefficient > 0 or config.train.teacher_model is not None))
    kept = NUMBER_BYTES[config.model.dtype] if sharded else NUMBER_BYTES["float32"]
    state = (adapters or numbers) * STATE_BYTES + frozen * kept
    if places is None:
        return Mesh(config.train.ranks, config.train.ranks, state)
    count, asked = ranks or places.ranks, config.train.ranks
    return mesh_of(state, count, places.gpus, gpu_bytes, 1 if count % asked else asked)


def engine_bytes(config: Config, model_dir: Path, row_tokens: int) -> dict[str, int]:
    """Bytes that an engine keeps, by part; a row has at most `row_tokens`."""
    number_bytes, numbers = NUMBER_BYTES[config.model.dtype], sum(map(prod, shapes_of(model_dir).values()))
    groups = config.train.groups_per_step * (config.asynchrony.max_staleness + 1)
    running = min(config.engine.max_running, groups * config.rollout.group_size)
    kv_row = sizes_of(model_dir).kv_numbers_per_token * row_tokens
    return {"weights": numbers * number_bytes, "kv": running * kv_row * number_bytes}


def _engines_of_rank(config: Config) -> int:
    """Engines on the GPU of a rank, at most."""
    chosen, count, ranks = config.engine.gpus, config.engine.count, config.train.ranks
    if config.engine.urls or config.cluster.trainer:
        return 0
    return -(-count // ranks) if chosen == "shared" else max(map(chosen.count, config.train.gpus), default=0)


def check_fits(config: Config, model_dir: Path, machine_bytes: int | None = None) -> None:
    """Raises `ConfigError` when this host's ranks keep more than the machine's main memory and swap."""
    have = machine_bytes or psutil.virtual_memory().total + psutil.swap_memory().total
    needed = 0 if config.cluster.trainer else trainer_mesh(config, shapes_of(model_dir), 0).state_bytes
    if needed > have:
        raise ConfigError(
            f"model.path: expected a model whose training fits {have / 1e9:.1f} GB of memory; weights, gradients and "
            f"Adam's moments alone take {needed / 1e9:.1f} GB. Set train.lora.rank, or take a smaller model"
        )


GPUS_MIB: Final = {"a100-40": 40960, "l40s": 46068, "a100": 81920, "h100": 81559, "h200": 143771, "b200": 183359}
"""Memory by a GPU's name, as nvidia-smi shows it."""
CONTEXT_BYTES: Final = 2_500_000_000
"""CUDA's context, its libraries' workspaces and NCCL's buffers."""
USED: Final = 0.95
"""Share of the rest that tensors can fill: the allocator loses some to fragments."""
SIZES: Final = (32768, 16384, 8192, 4096, 2048, 1024)
"""Tokens of a micro-batch, from which the planner takes the first that fits."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A step of training on GPUs of some memory."""

    mesh: Mesh
    gpu_bytes: int
    tokens: int
    """Tokens of a micro-batch."""
    checkpointing: bool | str
    taken: FakeTaken
    moments: int
    """Bytes of Adam's moments on the GPU."""

    @property
    def needed_bytes(self) -> float:
        """Memory that the GPU must have."""
        return CONTEXT_BYTES + (self.taken.weights + self.moments + self.taken.passing) / USED

    @property
    def fits(self) -> bool:
        """Whether the GPU has it."""
        return self.needed_bytes <= self.gpu_bytes

    def __str__(self) -> str:
        parts = {"weights": self.taken.weights, "moments": self.moments, "gradients and a pass": self.taken.passing}
        said = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
        return (
            f"{self.needed_bytes / 1e9:.1f} of {self.gpu_bytes / 1e9:.1f} GB of each GPU ({said} GB), "
            f"{self.tokens} tokens a micro-batch, gradient_checkpointing {str(self.checkpointing).lower()}"
        )


def memory_of_gpu(name: str) -> int:
    """Bytes of a GPU by its name. Raises `ConfigError` for another name."""
    if name not in GPUS_MIB:
        raise ConfigError(f"--gpu: {expected_one_of(GPUS_MIB, name)}")
    return GPUS_MIB[name] << 20


def fitted(config: Config, model_dir: Path, mesh: Mesh, row_tokens: int, gpu_bytes: int) -> tuple[Config, Fit]:
    """Settings with the micro-batch and checkpointing that fit, where they were open.

    Raises `ConfigError` when none fits, with a setting that would help, and `ModelError` when no fake step runs.
    """
    if engines := _engines_of_rank(config):
        gpu_bytes -= engines * sum(engine_bytes(config, model_dir, row_tokens).values())
    own = "gradient_checkpointing" in config.model.model_fields_set
    kinds = (config.model.gradient_checkpointing,) if own else (False, True)
    asked = config.train.tokens_per_microbatch
    sizes = sorted({max(size, row_tokens) for size in ((asked,) if asked else SIZES)}, reverse=True)
    tried = Fit(mesh, gpu_bytes, 0, False, FakeTaken(0, 0, 0, 0, 0), 0)
    for kind in kinds:
        for tried in _fits(config, model_dir, row_tokens, mesh, gpu_bytes, kind, sizes):
            if tried.fits:
                model = config.model.model_copy(update={"gradient_checkpointing": kind})
                # A row longer than the budget is alone anyway.
                train = config.train.model_copy(update={"tokens_per_microbatch": asked or tried.tokens})
                return config.model_copy(update={"model": model, "train": train}), tried
    raise ConfigError(f"model.path: expected a step that fits its GPUs, got {tried}. {_advice(config, tried)}")


def _fits(
    config: Config,
    model_dir: Path,
    row_tokens: int,
    mesh: Mesh,
    gpu_bytes: int,
    kind: bool | str,
    sizes: Sequence[int],
) -> Sequence[Fit]:
    least = max(row_tokens, min(sizes))
    model = config.model.model_copy(update={"gradient_checkpointing": kind})
    asked = config.model_copy(update={"model": model})
    one, two = asked_child(question_of(asked, model_dir, mesh, row_tokens, gpu_bytes, (least, 2 * least)))
    slope = (two.passing - one.passing) / (two.tokens - one.tokens)
    moments = 0 if config.train.offload == "optimizer" else one.moments
    return [
        Fit(
            mesh,
            gpu_bytes,
            size,
            kind,
            msgspec.structs.replace(one, tokens=size, passing=int(one.passing + slope * (size - one.tokens))),
            moments,
        )
        for size in sizes
    ]


def question_of(
    config: Config, model_dir: Path, mesh: Mesh, row_tokens: int, gpu_bytes: int, sizes: tuple[int, ...]
) -> FakeQuestion:
    """Question about a run with micro-batches of some sizes, in tokens."""
    sections = (config.model.model_dump_json(), config.train.model_dump_json())
    return FakeQuestion(str(model_dir), *sections, mesh.ranks, mesh.per_copy, row_tokens, sizes, gpu_bytes)


def asked_child(question: FakeQuestion) -> list[FakeTaken]:
    """Answers of a process that runs the trainer with fake tensors. Raises `ModelError` when it fails."""
    command = [sys.executable, "-m", "shoal.trainer.fake_run"]
    done = subprocess.run(
        command, input=msgspec.json.encode(question), capture_output=True, check=False, env=torch_environment(1)
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ModelError(f"model {question.model_path!r} cannot be run with fake tensors: {last}")
    return [msgspec.json.decode(line, type=FakeTaken) for line in done.stdout.splitlines()]


def _advice(config: Config, tried: Fit) -> str:
    """Sentence with the first setting that makes the step fit."""
    over = tried.needed_bytes - tried.gpu_bytes
    if not tried.checkpointing:
        return "Set model.gradient_checkpointing = true"
    if tried.moments / USED > over:
        return 'Set train.offload = "optimizer"'
    state = tried.mesh.state_bytes / tried.mesh.shard
    if state / USED > over:
        ranks = tried.mesh.ranks * 2
        while tried.mesh.state_bytes / ranks > state - over * USED:
            ranks *= 2
        return f"Train on {ranks} GPUs"
    return "Set train.lora.rank, shorten rollout.max_tokens, or take a smaller model"
