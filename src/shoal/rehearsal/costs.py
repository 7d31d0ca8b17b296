"""Cost models: seconds of sampling, training and loading, from FLOPs and bytes, or as constants of a measured run.

Training    FLOPs of a row of L tokens are passes * (2 * A * L + 2 * layers * width * L^2), with A active parameters;
            the second term is the causal attention's. Forward and backward take 3 passes (Kaplan et al., arXiv
            2001.08361, section 2.1), and one more computes the logprobs before the update.
Sampling    A decode step reads the weights once and the KV cache of all running sequences (Pope et al., arXiv
            2211.05102, section 2): seconds = fixed + max(weights, n * multiply) + context * read.
Loading     Bytes of the weights over the link of an engine.

The efficiencies are shares of a GPU's published peaks.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from shoal.errors import ConfigError, ModelError, did_you_mean
from shoal.model.file_sizes import router_experts, shapes_of, sizes_of

BYTES = 2
"""Bytes of a bfloat16 number."""


PASSES = 4.0
"""Passes of a step over its rows: forward, backward, which counts twice, and one for the logprobs before the update."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published peaks of a GPU: dense bfloat16 FLOP/s, bytes/s and bytes of its memory, bytes/s of its network link."""

    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float = 50e9
    """400 Gbit/s, one network port per GPU."""


GPUS = {
    "a100": Gpu(312e12, 2.039e12, 80e9, 25e9),
    "h100": Gpu(989e12, 3.35e12, 80e9),
    "h800": Gpu(989e12, 3.35e12, 80e9),
    "h20": Gpu(148e12, 4.0e12, 96e9),
    "h200": Gpu(989e12, 4.8e12, 141e9),
    "b200": Gpu(2250e12, 8.0e12, 180e9),
    "l40s": Gpu(362e12, 0.864e12, 48e9, 12.5e9),
}
"""Source: NVIDIA's data sheets, SXM variants, without sparsity."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of a model on which its costs depend."""

    parameters: float
    active: float
    """Parameters that one token uses."""
    layers: int
    width: int
    """Query heads times their width."""
    kv_numbers: int
    """Numbers in the KV cache per token."""


MODELS = {
    "qwen2.5-0.5b": ModelShape(0.494e9, 0.494e9, 24, 896, 24 * 256),
    "qwen2.5-1.5b": ModelShape(1.54e9, 1.54e9, 28, 1536, 28 * 512),
    "qwen2.5-7b": ModelShape(7.62e9, 7.62e9, 28, 3584, 28 * 1024),
    "qwen2.5-14b": ModelShape(14.8e9, 14.8e9, 48, 5120, 48 * 2048),
    "qwen2.5-32b": ModelShape(32.8e9, 32.8e9, 64, 5120, 64 * 2048),
    "qwen3-4b": ModelShape(4.02e9, 4.02e9, 36, 4096, 36 * 2048),
    "qwen3-8b": ModelShape(8.19e9, 8.19e9, 36, 4096, 36 * 2048),
    "qwen3-32b": ModelShape(32.8e9, 32.8e9, 64, 8192, 64 * 2048),
    "qwen3-30b-a3b": ModelShape(30.5e9, 3.3e9, 48, 4096, 48 * 1024),
    "qwen3-235b-a22b": ModelShape(235e9, 22e9, 94, 8192, 94 * 1024),
    "llama-3.1-8b": ModelShape(8.03e9, 8.03e9, 32, 4096, 32 * 2048),
    "llama-3.1-70b": ModelShape(70.6e9, 70.6e9, 80, 8192, 80 * 2048),
}
"""Published configurations, by the end of the name."""


def shape_of(model: str) -> ModelShape:
    """Shape of a model: a directory, or a name that begins or ends with one of `MODELS`. Raises `ModelError`."""
    if Path(model).is_dir():
        sizes, shapes = sizes_of(Path(model)), shapes_of(Path(model))
        numbers = sum(map(prod, shapes.values()))
        experts = max(router_experts(Path(model)).values(), default=1)
        idle_share = 1 - min((sizes.num_experts_per_tok or experts) / experts, 1)
        idle = idle_share * sum(prod(shape) for name, shape in shapes.items() if ".experts." in name)
        heads = sizes.num_attention_heads
        width = heads * (sizes.head_dim or sizes.hidden_size // heads)
        return ModelShape(numbers, numbers - idle, sizes.num_hidden_layers, width, sizes.kv_numbers_per_token)
    name = model.rpartition("/")[2].lower()
    found = [known for known in MODELS if known in name]
    if not found:
        near = did_you_mean(name, list(MODELS), str) or f"; known are {', '.join(MODELS)}"
        raise ModelError(f"model.path: expected a directory or a model whose shape is known, got {model!r}{near}")
    return MODELS[max(found, key=len)]


def gpu_of(name: str) -> Gpu:
    """A GPU by name. Raises `ConfigError`."""
    if name.lower() not in GPUS:
        raise ConfigError(f"--gpu: expected one of {', '.join(GPUS)}, got {name!r}")
    return GPUS[name.lower()]


TRAINING = 0.43
"""Share of a GPU's FLOP/s that training reaches: AReaL (arXiv 2505.24298), figure 6a."""
PREFILL = 0.5
"""Share of the FLOP/s in prefill and decode."""
MEMORY, DECODE_FIXED_S = 0.52, 12e-3
"""Share of the bytes/s in decode, and seconds of a decode step besides its bytes and FLOPs.

Figure 6b has the tokens per second of engines for two sizes of models; docs/explanation/rehearsal.md derives the rest.
"""
LINK = 0.5
"""Share of the link's bytes/s in loads of weights."""
STEP_FIXED_S = 5.0
"""Seconds of a training step besides its FLOPs."""


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Seconds of one engine."""

    fixed_s: float
    """Part of each decode step that nothing changes."""
    weights_s: float = 0.0
    """Part of a decode step that reads the weights; sequences share it."""
    sequence_s: float = 0.0
    """Part of a decode step per sequence; hidden by `weights_s` up to that."""
    context_s: float = 0.0
    """Part of a decode step per token of context."""
    prefill_s: float = 0.0
    """Per token of a prompt, or of an answer that is computed again."""
    load_s: float = 0.0
    """Seconds of a load of weights."""
    places: int = 1 << 20
    """Sequences at once."""

    def base_s(self, running: int) -> float:
        """Seconds of a decode step of `running` sequences, without their context."""
        return self.fixed_s + max(self.weights_s, running * self.sequence_s)


@dataclass(frozen=True, slots=True)
class TrainerCost:
    """Seconds of the trainer."""

    fixed_s: float
    """Part of each step that its rows do not change."""
    token_s: float
    """Per token of a step's rows."""
    square_s: float = 0.0
    """Per square of a row's tokens: attention."""
    write_s: float = 0.0
    """Seconds of a written Version."""
    save_s: float = 0.0
    """Seconds of a checkpoint."""

    def step_s(self, rows: "list[int]") -> float:
        """Seconds of a step on rows of these lengths in tokens."""
        squares = sum(row * row for row in rows) if self.square_s else 0
        return self.fixed_s + self.token_s * sum(rows) + self.square_s * squares


@dataclass(frozen=True, slots=True)
class GpuSplit:
    """GPUs of a run."""

    trainer: int
    engines: int
    per_engine: int = 1

    @property
    def count(self) -> int:
        """Number of engines."""
        return max(self.engines // self.per_engine, 1)


def engine_cost(shape: ModelShape, gpu: Gpu, per_engine: int, context: float, places: int) -> EngineCost:
    """Cost of an engine of `per_engine` GPUs whose sequences have `context` tokens at most. Raises `ConfigError`."""
    room = 0.9 * gpu.memory_bytes * per_engine - BYTES * shape.parameters
    fits = int(room / (BYTES * shape.kv_numbers * context))
    if fits < 1:
        raise ConfigError(
            f"--gpus-per-engine: expected enough for weights of {BYTES * shape.parameters / 1e9:.0f} GB and a sequence "
            f"of {context:.0f} tokens, got {per_engine} of {gpu.memory_bytes / 1e9:.0f} GB; take more"
        )
    bytes_per_s = gpu.memory_bytes_per_s * per_engine * MEMORY
    flops_per_s = gpu.flops_per_s * per_engine * PREFILL
    return EngineCost(
        DECODE_FIXED_S,
        BYTES * shape.parameters / bytes_per_s,
        2 * shape.active / flops_per_s,
        BYTES * shape.kv_numbers / bytes_per_s,
        2 * shape.active / flops_per_s,
        BYTES * shape.parameters / (gpu.link_bytes_per_s * per_engine * LINK),
        min(places, fits),
    )


def trainer_cost(shape: ModelShape, gpu: Gpu, count: int) -> TrainerCost:
    """Cost of a trainer of `count` GPUs; a Version is written by all of them, each its part."""
    flops_per_s = gpu.flops_per_s * count * TRAINING
    written_s = BYTES * shape.parameters / (gpu.link_bytes_per_s * count * LINK)
    return TrainerCost(
        STEP_FIXED_S,
        PASSES * 2 * shape.active / flops_per_s,
        PASSES * 2 * shape.layers * shape.width / flops_per_s,
        written_s,
        7 * written_s,  # float32 weights and two moments: 12 bytes for 2, and what is read to copy them
    )


def smallest_engine(shape: ModelShape, gpu: Gpu, context: float) -> int:
    """Fewest GPUs, a power of two, that hold the weights and the KV cache of eight sequences."""
    needed = BYTES * (shape.parameters + 8 * shape.kv_numbers * context)
    count = 1
    while 0.9 * gpu.memory_bytes * count < needed:
        count *= 2
    return count
