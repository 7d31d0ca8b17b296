"""torchtitan's decoder behind a model of transformers, on two or more ranks.

`parallelize_qwen3` shards the decoder: FSDP2 over the ranks that have other rows, tensor and sequence parallelism over
`Ranks.per_layer` neighbours that have the same ones. The decoder and the model share their parameters. Attention is
Shoal's own on the heads of a rank, so that rows are packed as elsewhere. Llama is Qwen3 without norms of queries
and keys.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model, Qwen3StateDictAdapter, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.protocols.module import Module
from transformers import PretrainedConfig, PreTrainedModel

from shoal.config import ModelConfig
from shoal.errors import ConfigError
from shoal.model.attention import Scores
from shoal.model.loading import empty_model
from shoal.model.mixers import Layout
from shoal.model.tensor_files import TensorFiles, Tensors
from shoal.trainer.ranks import Ranks, local, whole
from shoal.trainer.sharded_start import fill, move

FAMILIES = ("llama", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotation that do not depend on the length of a row."""
BACKEND = "partial_dtensor"
NO_INIT = {"weight": skip_param_init}


def started(
    path: Path | str, model: ModelConfig, ranks: Ranks, device: str, files: Tensors | None = None
) -> tuple[PreTrainedModel, nn.Module, "TitanForward"]:
    """Model at `path`, of which each rank reads its part, with torchtitan's decoder and forward.

    All ranks call it. Raises `ModelError`, and `ConfigError` for what torchtitan lacks.
    """
    shell = empty_model(path)
    if complaint := _complaint(shell.config, model, ranks):
        raise ConfigError(f"train.backend: expected 'sharded' for what torchtitan lacks: {complaint}")
    move(shell, device)
    decoder = _sharded(shell.config, ranks, device, model.dtype)
    names = Qwen3StateDictAdapter(decoder.config, None).to_hf({name: name for name, _ in decoder.named_parameters()})
    for name, other in names.items():
        _set(shell, name, decoder.get_parameter(other))
    shell.tie_weights()
    fill(shell, files or TensorFiles(Path(path)), device)
    for name, other in names.items():
        _set(decoder, other, shell.get_parameter(name))
    if decoder.enable_weight_tying:
        _set(decoder, "lm_head.weight", decoder.tok_embeddings.weight)
    _rotate(decoder, shell, device)
    return shell, decoder, TitanForward(shell, decoder, ranks.per_layer)


def _complaint(config: PretrainedConfig, model: ModelConfig, ranks: Ranks) -> str:
    """Complaint about a model or about ranks that torchtitan lacks; empty for none."""
    if ranks.count < 2 or (ranks.per_copy or ranks.count) % ranks.per_layer:
        return f"one of {ranks.count} ranks that split a layer over {ranks.per_layer}"
    if model.gradient_checkpointing:
        return "model.gradient_checkpointing"
    biased = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    windows = getattr(config, "use_sliding_window", False)
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if config.model_type not in FAMILIES or biased or windows or config.hidden_act != "silu" or kind not in STATIC_ROPE:
        return f"a {config.model_type} model other than {' or '.join(FAMILIES)} with silu and without biases or windows"
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    odd = [name for name in sizes if getattr(config, name) % ranks.per_layer]
    return f"{odd[0]} {getattr(config, odd[0])} over {ranks.per_layer} ranks" if odd else ""


def _sharded(config: PretrainedConfig, ranks: Ranks, device: str, dtype: str) -> Any:
    """Decoder whose parameters are sharded and have no memory."""
    # torchtitan takes CUDA where it finds no other device, for this too.
    parallel_dims.device_type = torch.device(device).type
    set_spmd_backend(BACKEND)
    copies = ranks.count // (ranks.per_copy or ranks.count)
    degrees = {"data_parallel_replicate_degree": copies, "tensor_parallel_degree": ranks.per_layer}
    parallelism = ParallelismConfig(spmd_backend=BACKEND, **degrees)
    described = _description(config)
    set_qwen3_sharding_config(described, enable_sp=parallelism.enable_sequence_parallel, enable_ep=False)
    with torch.device("meta"):
        decoder = described.build()
    parallelize_qwen3(
        decoder,
        parallel_dims=ParallelDims.from_config(parallelism, ranks.count),
        training=TrainingConfig(mixed_precision_param=dtype),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    for module in decoder.modules():
        if isinstance(module, FSDPModule):  # the mean over ranks, as of `Ranks.shard`; gloo has no other
            module.set_gradient_divide_factor(None)  # type: ignore[arg-type]
    return decoder


def _description(config: PretrainedConfig) -> Any:
    """torchtitan's description of a model."""
    width, heads = config.hidden_size, config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or width // heads

    def norm(size: int) -> Any:
        return RMSNorm.Config(normalized_shape=size, eps=config.rms_norm_eps, param_init=NO_INIT)

    def block() -> Any:
        attention = make_gqa_config(
            dim=width,
            n_heads=heads,
            n_kv_heads=config.num_key_value_heads,
            head_dim=head_width,
            wqkv_param_init=NO_INIT,
            wo_param_init=NO_INIT,
            inner_attention=PackedAttention.Config(),
            rope=CosSinRoPE.Config(dim=head_width, max_seq_len=config.max_position_embeddings),
            qk_norm=norm(head_width) if config.model_type == "qwen3" else None,
        )
        ffn = make_ffn_config(
            dim=width, hidden_dim=config.intermediate_size, w1_param_init=NO_INIT, w2w3_param_init=NO_INIT
        )
        return Qwen3TransformerBlock.Config(
            attention=attention, feed_forward=ffn, attention_norm=norm(width), ffn_norm=norm(width)
        )

    vocabulary = config.vocab_size
    return Qwen3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        norm=norm(width),
        enable_weight_tying=config.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=NO_INIT),
        lm_head=Linear.Config(in_features=width, out_features=vocabulary, param_init=NO_INIT),
        layers=[block() for _ in range(config.num_hidden_layers)],
    )


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, parameter)


@torch.no_grad()
def _rotate(decoder: Any, shell: PreTrainedModel, device: str) -> None:
    """Gives the decoder transformers' cosines and sines, which know more kinds of scaling."""
    position_1L = torch.arange(shell.config.max_position_embeddings, device=device)[None]
    rotation_LD = torch.cat(shell.base_model.rotary_emb(torch.zeros(1, device=device), position_1L), -1)[0]
    for layer in decoder.layers.values():
        rope = layer.attention.rope
        rope.init_states(buffer_device=torch.device(device))
        local(rope.cache).copy_(rotation_LD)


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Packed rows of a pass, and how many tokens they have; more are padding."""

    layout: Layout
    tokens: int


class PackedAttention(Module):  # type: ignore[misc]
    """Attention of packed rows over themselves, on the heads of this rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """Nothing to set."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: PaddedRows, scale: float, **_: object
    ) -> Tensor:
        """Attention [1, T, N, H], in torchtitan's axes; padding gets zeros."""
        rows, padding = attention_masks, q_BLNH.shape[1] - attention_masks.tokens
        q_THD, k_TKD, v_TKD = (one[0, : rows.tokens] for one in (q_BLNH, k_BLNH, v_BLNH))
        out_THD = rows.layout.attend(0, q_THD, k_TKD, v_TKD, Scores(scale))
        return F.pad(out_THD, (0, 0, 0, 0, 0, padding))[None]


class TitanForward:
    """Forward through torchtitan's decoder."""

    def __init__(self, model: PreTrainedModel, decoder: Any, per_layer: int) -> None:
        self.model, self._decoder, self._per_layer = model, decoder, per_layer

    def hidden(self, token_T: Tensor, position_T: Tensor, layout: Layout, keep_U: Tensor) -> Tensor:
        """Inputs [U, W] of the language-model head at the kept positions, on every rank of a layer."""
        seen: list[Tensor] = []

        def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            seen.append(whole(arguments[0]))
            return (seen[0][:, :1],)

        # Sequence parallelism cuts tokens into equal parts; with others its ranks wait for each other forever.
        padding = -len(token_T) % self._per_layer
        token_1T, position_1T = (torch.cat((one, one[-1:].expand(padding)))[None] for one in (token_T, position_T))
        hook = self._decoder.lm_head.register_forward_pre_hook(keep)
        try:
            self._decoder(token_1T, position_1T, PaddedRows(layout, len(token_T)))
        finally:
            hook.remove()
        return seen[0][0].index_select(0, keep_U)

    def head(self, hidden_UW: Tensor) -> Tensor:
        """Logits [U, V], on every rank of a layer; follows `hidden`, which gathers the weight."""
        weight = self._decoder.lm_head.weight
        if not isinstance(weight, DTensor):
            return F.linear(hidden_UW, weight)
        hidden = DTensor.from_local(hidden_UW, weight.device_mesh, [Replicate()])
        return whole(F.linear(hidden, weight)).clone()  # logits are overwritten, which a view of theirs would forbid
