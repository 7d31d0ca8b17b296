"""Memory that the processes of a run will take, part by part, from the sizes of the model and the settings.

`shoal bench memory` compares these sums with the peak resident memory of real runs.
"""

from collections.abc import Mapping
from math import prod

from shoal.config import Config
from shoal.model import MOST_LOGITS
from shoal.run.prepared import Prepared, sizes_of, version_file
from shoal.trainer.packing import tokens_per_microbatch
from shoal.weights.store import FILE

PROGRAM_BYTES = {"trainer": 400_000_000, "engine": 410_000_000}
"""Python, torch and transformers before a model is loaded, measured."""
WEIGHT_BYTES = 4  # float32, whatever the engine's
TRAINED_BYTES = 12  # gradient and two moments
LOGIT_COPIES = 3  # of a chunk: itself, what the loss keeps of it, and its gradient
BYTES = {"float32": 4, "bfloat16": 2}


def longest_row(config: Config, prepared: Prepared) -> int:
    """Tokens of a prompt and its answer at most."""
    return min(prepared.longest_prompt + config.rollout.max_tokens, prepared.max_model_len)


def memory_of(config: Config, prepared: Prepared, shapes: Mapping[str, list[int]]) -> dict[str, dict[str, int]]:
    """Bytes by process and part: of an engine, and of each rank of the trainer."""
    return {"engine": _engine(config, prepared, shapes), "trainer": _trainer(config, prepared, shapes)}


def _engine(config: Config, prepared: Prepared, shapes: Mapping[str, list[int]]) -> dict[str, int]:
    parameters, number_bytes = sum(map(prod, shapes.values())), BYTES[config.model.dtype]
    row_bytes = sizes_of(prepared.model_dir).kv_numbers_per_token * number_bytes * longest_row(config, prepared)
    running = min(config.engine.max_running, _rows(config) * (config.asynchrony.max_staleness + 1))
    staged = parameters if version_file(config) == FILE else _adapted(config, shapes)
    return {
        "program": PROGRAM_BYTES["engine"],
        "weights": parameters * number_bytes,
        "next_weights": staged * number_bytes,
        "kv": row_bytes * running,
    }


def _trainer(config: Config, prepared: Prepared, shapes: Mapping[str, list[int]]) -> dict[str, int]:
    parameters, rank, places = sum(map(prod, shapes.values())), config.train.lora.rank, config.cluster.trainer
    ranks = (places.per_host or places.ranks) if places else config.train.ranks
    adapters = sum(rank * sum(shape) for name, shape in shapes.items() if _is_adapted(name, shape, config))
    return {
        "program": PROGRAM_BYTES["trainer"],
        "weights": (parameters + adapters) * WEIGHT_BYTES // ranks,
        "gradient_and_moments": (adapters if rank else parameters) * TRAINED_BYTES // ranks,
        "reference": parameters * WEIGHT_BYTES // ranks if config.train.kl.coefficient else 0,
        **_micro_batch(config, prepared),
    }


def _micro_batch(config: Config, prepared: Prepared) -> dict[str, int]:
    """Bytes of activations kept for the backward pass, and of one chunk of logits."""
    sizes, row_tokens = sizes_of(prepared.model_dir), longest_row(config, prepared)
    layers, width, vocabulary = sizes.num_hidden_layers, sizes.hidden_size, sizes.vocab_size or 0
    budget = config.train.tokens_per_microbatch or tokens_per_microbatch(on_gpu=bool(prepared.devices.ranks))
    tokens = min(max(budget, row_tokens), _rows(config) * row_tokens)
    of_layer = 8 * width + 4 * (sizes.intermediate_size or 4 * width)  # norms, projections, attention, feed-forward
    of_token = layers * width + of_layer if config.model.gradient_checkpointing else layers * of_layer
    return {
        "activations": tokens * of_token * BYTES[config.model.dtype],
        "logits": LOGIT_COPIES * min(tokens * vocabulary, max(MOST_LOGITS, vocabulary)) * WEIGHT_BYTES,
    }


def _rows(config: Config) -> int:
    return config.train.groups_per_step * config.rollout.group_size


def _adapted(config: Config, shapes: Mapping[str, list[int]]) -> int:
    """Numbers in the layers that LoRA adapts."""
    return sum(prod(shape) for name, shape in shapes.items() if _is_adapted(name, shape, config))


def _is_adapted(name: str, shape: list[int], config: Config) -> bool:
    """Tells whether LoRA adapts a tensor; by default every matrix but the vocabulary's."""
    if len(shape) != 2 or not name.endswith(".weight"):
        return False
    targets = config.train.lora.targets
    layer = name.removesuffix(".weight").rpartition(".")[2]
    return layer in targets if targets else "embed" not in layer and layer != "lm_head"
