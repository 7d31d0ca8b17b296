"""Memory that the processes of a run will take, part by part, from the sizes of the model and the settings.

`shoal bench memory` compares these sums with the peak resident memory of real runs. They are upper bounds where
answers have all their tokens and every group is trained; parts that take turns are counted once.
"""

from collections.abc import Mapping
from math import prod

from shoal.config import Config
from shoal.model import MOST_LOGITS
from shoal.run.prepared import Prepared, Sizes, sizes_of, version_file
from shoal.trainer.packing import tokens_per_microbatch
from shoal.weights.store import FILE

PROGRAM_BYTES = 405_000_000
"""Python, torch and transformers before a model is loaded, measured; the same in engine and trainer."""
WEIGHT_BYTES = 4  # float32 in the trainer
TRAINED_BYTES = 12  # gradient and two moments
SAMPLED_COPIES = 4  # float32, of the logits that a step of the engine samples from
SPARE_KV = 2  # pools of slots grow by doubling
PREFIX_BYTES = 256 * 2**20
"""KV that an engine keeps of ended sequences at most."""
JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Layers whose weights are joined on a CPU: the joint copy adds to the mapped file."""
OWN_FORWARD = ("llama", "mistral", "qwen2", "qwen3", "seed_oss")
"""Models whose layers Shoal computes without transformers' modules (`shoal.model.family`)."""
BYTES = {"float32": 4, "bfloat16": 2}


def longest_row(config: Config, prepared: Prepared) -> int:
    """Tokens of a prompt and its answer at most."""
    return min(prepared.longest_prompt + config.rollout.max_tokens, prepared.max_model_len)


def memory_of(config: Config, prepared: Prepared, shapes: Mapping[str, list[int]]) -> dict[str, dict[str, int]]:
    """Bytes by process and part: of an engine, and of each rank of the trainer."""
    return {"engine": _engine(config, prepared, shapes), "trainer": _trainer(config, prepared, shapes)}


def _engine(config: Config, prepared: Prepared, shapes: Mapping[str, list[int]]) -> dict[str, int]:
    number_bytes, sizes = BYTES[config.model.dtype], sizes_of(prepared.model_dir)
    row_bytes = sizes.kv_numbers_per_token * number_bytes * longest_row(config, prepared)
    running = min(config.engine.max_running, _rows(config) * (config.asynchrony.max_staleness + 1))
    answers = 2 * config.held_out_questions + _rows(config) * config.train.steps
    whole = version_file(config) == FILE
    adapted = _adapted(config, shapes)
    by_hand = sizes.model_type in OWN_FORWARD and not prepared.devices.engines
    in_blocks = by_hand and number_bytes < WEIGHT_BYTES
    return {
        "program": PROGRAM_BYTES,
        "weights": _numbers(shapes) * number_bytes,
        "joined_weights": _joined(shapes) * number_bytes if by_hand else 0,
        "weights_in_blocks": _multiplied(shapes) * number_bytes if in_blocks else 0,
        # An adapter is merged into the weights of the base, whose float32 file is mapped.
        "next_weights": _numbers(shapes) * number_bytes if whole else adapted * (number_bytes + WEIGHT_BYTES),
        "checked_tensor": max(map(prod, shapes.values())) * number_bytes,
        "kv": SPARE_KV * row_bytes * running,
        "prefixes": min(PREFIX_BYTES, answers * row_bytes),
        "logits": SAMPLED_COPIES * running * (sizes.vocab_size or 0) * WEIGHT_BYTES,
    }


def _trainer(config: Config, prepared: Prepared, shapes: Mapping[str, list[int]]) -> dict[str, int]:
    parameters, rank, places = _numbers(shapes), config.train.lora.rank, config.cluster.trainer
    ranks = (places.per_host or places.ranks) if places else config.train.ranks
    adapters = sum(rank * sum(shape) for name, shape in shapes.items() if _is_adapted(name, shape, config))
    of_family = sizes_of(prepared.model_dir).model_type in OWN_FORWARD and not prepared.devices.ranks
    by_hand = of_family and ranks == 1 and not rank and not config.model.gradient_checkpointing
    models = 2 if config.train.kl.coefficient else 1  # and the reference
    step = {
        "weights_of_products": models * _copies(config, shapes, by_hand=by_hand, ranks=ranks),
        **_micro_batch(config, prepared, by_hand=by_hand),
    }
    return {
        "program": PROGRAM_BYTES,
        "weights": (parameters + adapters) * WEIGHT_BYTES // ranks,
        "gradient_and_moments": (adapters if rank else parameters) * TRAINED_BYTES // ranks,
        "reference": parameters * WEIGHT_BYTES // ranks if models == 2 else 0,
        **step,
        "merged_weights": max(0, _merged(config, shapes) - sum(step.values())),  # when no step is taken
    }


def _merged(config: Config, shapes: Mapping[str, list[int]]) -> int:
    """Bytes of the whole model that a run with adapters writes at its end: merged layers, their cast, and the file's.

    Without adapters the gradient's memory holds the written copy.
    """
    if not config.train.lora.rank:
        return 0
    return _adapted(config, shapes) * WEIGHT_BYTES + 2 * _numbers(shapes) * BYTES[config.model.dtype]


def _copies(config: Config, shapes: Mapping[str, list[int]], *, by_hand: bool, ranks: int) -> int:
    """Bytes of the weights as products use them: joined, cast, or gathered from the ranks layer by layer."""
    number_bytes, layer = BYTES[config.model.dtype], _largest_layer(shapes)
    # A layer and its gradient, each whole and as it is sent.
    gathered = 4 * layer * WEIGHT_BYTES if ranks > 1 else 0
    if number_bytes == WEIGHT_BYTES:
        return gathered + (_joined(shapes) * WEIGHT_BYTES if by_hand else 0)
    # Autocast's copies of a checkpointed layer go with the layer.
    return gathered + (layer if config.model.gradient_checkpointing else _numbers(shapes)) * number_bytes


def _micro_batch(config: Config, prepared: Prepared, *, by_hand: bool) -> dict[str, int]:
    """Bytes of activations kept for the backward pass, and of one chunk of logits."""
    sizes, number_bytes = sizes_of(prepared.model_dir), BYTES[config.model.dtype]
    layers, vocabulary = sizes.num_hidden_layers, sizes.vocab_size or 1
    row = longest_row(config, prepared)
    prompt, group = row - config.rollout.max_tokens, config.rollout.group_size
    of_group = max(row, prompt + group * config.rollout.max_tokens)  # a shared prompt is computed once
    budget = config.train.tokens_per_microbatch or tokens_per_microbatch(
        vocabulary, layers * sizes.hidden_size, on_gpu=bool(prepared.devices.ranks)
    )
    tokens = min(max(budget, row), config.train.groups_per_step * of_group)
    of_layer = _kept_by_hand(sizes) * number_bytes if by_hand else _kept_by_modules(sizes, number_bytes)
    stream = sizes.hidden_size * WEIGHT_BYTES
    of_token = layers * of_layer
    if kind := config.model.gradient_checkpointing:
        products = _products(sizes) * number_bytes if kind == "selective" else 0
        of_token = layers * (stream + products) + of_layer
    return {
        "activations": tokens * of_token,
        "logits": min(tokens * vocabulary, max(MOST_LOGITS, vocabulary)) * number_bytes,
    }


def _kept_by_hand(sizes: Sizes) -> int:
    """Numbers that a layer of `TrainingForward` keeps of each token: the stream, attention, feed-forward."""
    queries, keys = sizes.widths
    return 2 * sizes.hidden_size + 2 * queries + 2 * keys + 2 * sizes.feed_forward


def _kept_by_modules(sizes: Sizes, number_bytes: int) -> int:
    """Bytes that a layer of transformers' modules keeps of each token: norms in float32, the rest as products are."""
    queries, keys = sizes.widths
    norms = 2 * sizes.hidden_size * (3 * WEIGHT_BYTES + number_bytes)
    return norms + (8 * (queries + keys) + queries + 4 * sizes.feed_forward) * number_bytes


def _products(sizes: Sizes) -> int:
    """Numbers that a layer computes of each token by products with weights, and by attention."""
    queries, keys = sizes.widths
    return 2 * queries + 2 * keys + 2 * sizes.feed_forward + 2 * sizes.hidden_size


def _numbers(shapes: Mapping[str, list[int]]) -> int:
    return sum(map(prod, shapes.values()))


def _joined(shapes: Mapping[str, list[int]]) -> int:
    return sum(prod(shape) for name, shape in shapes.items() if name.removesuffix(".weight").endswith(JOINED))


def _multiplied(shapes: Mapping[str, list[int]]) -> int:
    """Elements of all weights of products; a tied head is the embedding."""
    tied = not any("lm_head" in name for name in shapes)
    return sum(prod(shape) for name, shape in shapes.items() if len(shape) == 2 and (tied or "embed" not in name))


def _largest_layer(shapes: Mapping[str, list[int]]) -> int:
    """Numbers of the largest group of tensors that have one layer's name; the embedding is a group too."""
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        head, found, rest = name.partition(".layers.")
        layer = f"{head}.{rest.partition('.')[0]}" if found else "outside of layers"
        sizes[layer] = sizes.get(layer, 0) + prod(shape)
    return max(sizes.values())


def _rows(config: Config) -> int:
    return config.train.groups_per_step * config.rollout.group_size


def _adapted(config: Config, shapes: Mapping[str, list[int]]) -> int:
    """Numbers in the layers that LoRA adapts."""
    return sum(prod(shape) for name, shape in shapes.items() if _is_adapted(name, shape, config))


def _is_adapted(name: str, shape: list[int], config: Config) -> bool:
    """Whether LoRA adapts a tensor; by default every matrix but the vocabulary's."""
    if len(shape) != 2 or not name.endswith(".weight"):
        return False
    targets = config.train.lora.targets
    layer = name.removesuffix(".weight").rpartition(".")[2]
    return layer in targets if targets else "embed" not in layer and layer != "lm_head"
