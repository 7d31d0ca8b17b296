"""A second trainer backend behind the same messages: torchtitan's Qwen3 mixture of experts and its expert parallelism.

    tokens --torchtitan's layers; attention over packed rows is Shoal's--> hidden states --head--> logits
                 '--experts: torchtitan's all-to-all (its axis `ep`)

Dense weights are sharded as with Shoal's own models. A rank keeps its experts whole, and torchtitan computes them in
bfloat16 for any `model.dtype`. Weights leave the trainer under the checkpoint's names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig

from shoal.errors import ConfigError
from shoal.model.attention import Scores
from shoal.model.tensor_files import TensorFiles
from shoal.trainer.ranks import Ranks

EXPERTS = {"w1_EFD": "gate_proj", "w3_EFD": "up_proj", "w2_EDF": "down_proj"}
"""torchtitan's tensors of all experts, and the checkpoint's name of an expert's part."""
EXPECTED = {"model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "norm_topk_prob": True, "tie_word_embeddings": False}
"""Settings of a model that torchtitan computes as transformers does."""


class TitanModel(nn.Module):
    """torchtitan's model behind the interface that Shoal's trainer uses of transformers."""

    def __init__(self, path: Path | str, ranks: Ranks, device: str) -> None:
        """Every rank reads the whole model, and keeps its part. Raises `ConfigError` and `ModelError`."""
        super().__init__()
        self.config = AutoConfig.from_pretrained(path)
        for name, wanted in {**EXPECTED, "mlp_only_layers": [], "decoder_sparse_step": 1}.items():
            if (got := getattr(self.config, name)) != wanted:
                raise ConfigError(f"train.experts: expected a model with {name} {wanted!r} for torchtitan, got {got!r}")
        if ranks.per_copy is not None or int(self.config.num_experts) % ranks.count:
            raise ConfigError(
                f"train.experts: expected ranks of one mesh that divide {self.config.num_experts} experts for "
                f"torchtitan, got {ranks.count}"
            )
        self.titan, self._names = _built(self.config, TensorFiles(Path(path)), ranks.count, device)
        self.attentions = [_Attention(index) for index in range(len(self.titan.layers))]
        for attention, layer in zip(self.attentions, self.titan.layers.values(), strict=True):
            layer.attention.inner_attention = attention
        if ranks.count > 1:
            _share(self.titan, ranks.count, device)

    def get_input_embeddings(self) -> Any:
        """Embedding of tokens."""
        return self.titan.tok_embeddings

    def get_output_embeddings(self) -> Any:
        """Language-model head."""
        return self.titan.lm_head

    def forward(self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, layout: Any, **_: object) -> Any:
        """Logits [1, U, V] of tokens [1, T] at the kept positions [U]; rows are those of `layout`."""
        for attention in self.attentions:
            attention.layout = layout
        hidden_1TW = self.titan(input_ids, position_ids)
        return self.titan.lm_head(hidden_1TW[:, logits_to_keep])

    def checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors as the checkpoint names and splits them; counters of torchtitan's own are left out."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            layer, _, rest = name.removeprefix("titan.").partition(".moe.routed_experts.inner_experts.")
            if part := EXPERTS.get(rest):
                experts = f"model.{layer}.mlp.experts"
                found |= {f"{experts}.{index}.{part}.weight": one for index, one in enumerate(tensor.unbind())}
            elif known := self._names.get(name.removeprefix("titan.")):
                found[known] = tensor
        return found


class _Attention(nn.Module):
    """Attention over packed rows, in place of torchtitan's."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index
        self.layout: Any = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, **_: object) -> Tensor:
        """Queries [1, T, H, D], keys and values [1, T, K, D]."""
        scaling = query.shape[-1] ** -0.5 if scale is None else scale
        return self.layout.attend(self._index, query[0], key[0], value[0], Scores(scaling))[None]  # type: ignore[no-any-return]


def _built(config: Any, files: TensorFiles, ranks: int, device: str) -> tuple[Any, dict[str, str]]:
    """torchtitan's model with the weights of a checkpoint, whole, and the checkpoint's names of its dense tensors."""
    try:
        from torchtitan.distributed.utils import set_spmd_backend
        from torchtitan.models import qwen3
        from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
        from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
    except ModuleNotFoundError as error:
        raise ConfigError(f"train.experts: expected torchtitan 0.3 and what it imports, got none: {error}") from error
    set_spmd_backend("partial_dtensor")
    width = config.hidden_size
    rope = {"dim": config.head_dim, "max_seq_len": config.max_position_embeddings, "theta": _theta(config)}
    settings = qwen3.Qwen3Model.Config(
        vocab_size=config.vocab_size,
        dim=width,
        norm=qwen3._qwen3_norm(width),
        tok_embeddings=qwen3.Embedding.Config(
            num_embeddings=config.vocab_size, embedding_dim=width, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=qwen3.Linear.Config(in_features=width, out_features=config.vocab_size, param_init=qwen3._LINEAR_INIT),
        layers=qwen3._build_qwen3_moe_layers(
            n_layers=config.num_hidden_layers,
            dim=width,
            n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            moe_hidden_dim=config.moe_intermediate_size,
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            fuse_qkv=False,
            attn_backend="flex",
            moe_comm_backend="standard",
            rope=qwen3.CosSinRoPE.Config(**rope),
        ),
    )
    set_qwen3_sharding_config(settings, enable_sp=False, enable_ep=ranks > 1)
    model, adapter = settings.build(), Qwen3StateDictAdapter(settings, None)
    state = adapter.from_hf({name: files.whole(name).float() for name in files})
    missing, _ = model.load_state_dict(state, strict=False)
    if lost := [name for name in missing if not name.endswith("expert_bias_E")]:
        raise ConfigError(f"train.experts: expected all tensors of the model for torchtitan, got none of {lost[0]}")
    names: dict[str, str] = {}
    for index in range(config.num_hidden_layers):
        names |= {
            own.format(index): key.format(index)
            for key, own in adapter.from_hf_map.items()
            if own and "experts" not in key
        }
    model._skip_lm_head = True
    return model.to(device).eval(), names


def _theta(config: Any) -> float:
    """Base of the rotations. Raises `ConfigError` for scaled ones."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"train.experts: expected rotations without scaling for torchtitan, got {rope}")
    return float(rope["rope_theta"])


def _share(model: Any, ranks: int, device: str) -> None:
    """Leaves each rank its experts, by torchtitan, and a part of everything else."""
    from torchtitan.distributed import ParallelDims, parallel_dims

    parallel_dims.device_type = torch.device(device).type
    dims = ParallelDims(1, ranks, 1, 1, 1, ranks, ranks, "partial_dtensor")
    model.parallelize(dims)
    experts = {p for name, p in model.named_parameters() if name.rpartition(".")[2] in EXPERTS}
    for parameter in experts:  # of the tokens of all ranks; gradients of other weights are means
        parameter.register_hook(lambda gradient: gradient / ranks)
    mesh = dims.get_mesh("ep")  # of all ranks: the norm of all gradients needs one mesh
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, ignored_params=experts)
    fully_shard(model, mesh=mesh, ignored_params=experts)
