"""Planner: whether a run fits its GPUs, and the size of a micro-batch and the checkpointing with which it does.

A child process runs the trainer with fake tensors (`trainer.fake_run`) for two sizes of a micro-batch. What a pass adds
grows in proportion to its tokens, so two sizes tell of every other.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from shoal.config import Config
from shoal.errors import ConfigError, ModelError, expected_one_of
from shoal.net.process import torch_environment
from shoal.run.machine.mesh import Mesh
from shoal.trainer.messages import FakeQuestion, FakeTaken

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
