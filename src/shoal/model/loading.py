"""Loading of Hugging Face causal LMs, with packed and cached attention through transformers' attention interface.

The attention function `shoal` is registered with transformers. Each forward carries a `Layout`, which defines how its
tokens attend to each other and to earlier tokens. transformers builds no mask, because none is registered for that
name.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from shoal.errors import ModelError
from shoal.model.attention import Scores
from shoal.model.mixers import Forwards, Layout
from shoal.model.packed import packed_logprobs

ATTENTION = "shoal"
IGNORED: Final = frozenset({"position_ids", "use_cache", "output_hidden_states", "output_router_logits"})
"""Arguments of attention that have no effect."""
HARMLESS: Final[Mapping[str, tuple[object, ...]]] = {
    "dropout": (0.0,),
    "is_causal": (True,),
    "output_attentions": (False,),
}
"""Values of other arguments that change nothing; None never does."""
LAYERS: Final = frozenset(
    {
        "chunked_attention", "conv", "full_attention", "hybrid", "hybrid_sliding", "indexed_attention",
        "linear_attention", "mlp", "moe", "sliding_attention",
    }
)  # fmt: skip
"""Kinds of layers that are computed."""
SAMPLED_OTHERWISE: Final = frozenset({"diffllama", "hrm_text", "zamba2"})
"""Models whose rows are computed as published, and their answers of the local engine are not (`make architectures`)."""
Checkpointing: TypeAlias = bool | Literal["selective"]
"""Activations that layers drop: none, all, or the cheap ones."""
KEPT_OPERATIONS: Final = tuple(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "_grouped_mm",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)
"""Products with weights, and attention: operations whose outputs selective checkpointing keeps."""
PROBE = ((5, 6, 7, 8, 9, 10), (5, 6, 4, 3))
PROBE_BOUND_NATS = {torch.float32: 1e-3, torch.bfloat16: 0.25}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attention function that transformers calls: [1, H, T, D] in, [1, T, H, D] out; `s_aux` are the heads' sinks."""
    forwards = getattr(module, "shoal_forwards", None)
    layout = layout or (forwards and forwards.layout)
    if layout is None or forwards is None:
        raise ModelError("this model attends through a Layout: call it through shoal.model.loading, not directly")
    _refuse_unknown({**others, "attention_mask": attention_mask})
    scores = Scores(
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        chunk=_chunk_of(module),
        cap=softcap,
        sinks_H=s_aux,
    )
    query_THD = _at_own_temperature(module, query[0].transpose(0, 1), forwards.position_T)
    out_THD = layout.attend(forwards.layer(module), query_THD, key[0].transpose(0, 1), value[0].transpose(0, 1), scores)
    return out_THD.unsqueeze(0), None


def _chunk_of(module: Any) -> int | None:
    """Tokens of a chunk that a layer's tokens see; None means all."""
    config = module.config
    kinds = getattr(config, "layer_types", None) or ()
    at = module.layer_idx
    chunked = at is not None and at < len(kinds) and kinds[at] == "chunked_attention"
    return config.attention_chunk_size if chunked else None


def _at_own_temperature(module: Any, query_THD: Tensor, position_T: Tensor | None) -> Tensor:
    """Queries of Llama 4 with the temperature of their positions in their row.

    Its layers without rotation have scaled them by their positions in the forward.
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope or position_T is None:
        return query_THD

    own_T, wrong_T = (
        torch.log1p(torch.floor((at_T.float() + 1) / float(module.floor_scale))) * float(module.attn_scale) + 1
        for at_T in (position_T, torch.arange(len(query_THD), device=query_THD.device))
    )
    return (query_THD * (own_T / wrong_T)[:, None, None]).to(query_THD.dtype)


AttentionInterface.register(ATTENTION, _attend)


def _refuse_unknown(arguments: Mapping[str, object]) -> None:
    """Raises `ModelError` for an argument that would change the result and is not computed here.

    Masks of a model's own come as such arguments. Ignoring an argument would compute another model,
    in the trainer and in the engine alike.
    """
    for name, value in arguments.items():
        if value is not None and name not in IGNORED and value not in HARMLESS.get(name, ()):
            raise ModelError(f"the model's attention is given {name!r}, which is not supported")


def refuse_different(model: PreTrainedModel) -> None:
    """Raises `ModelError` unless packed rows get the logprobs that transformers' own attention gives each row alone.

    The comparison shows every other property that a `Layout` cannot express. Examples are states carried over the end
    of a row, and attention that never calls the layout.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    rows = [torch.tensor(row, device=model.device) % vocabulary for row in PROBE]
    with torch.no_grad():
        try:
            logp_T = packed_logprobs(model, torch.cat(rows), [len(row_L) for row_L in rows])
            model.set_attn_implementation("eager")
            own = [model(row_L[None], use_cache=False).logits[0].float().log_softmax(-1) for row_L in rows]
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ModelError(f"models of kind {model.config.model_type!r} are not supported: {reason}") from error
        finally:
            model.set_attn_implementation(ATTENTION)
    zero = torch.zeros(1, device=model.device)
    expected = [
        torch.cat([zero, logp_LV[:-1].gather(-1, row_L[1:, None])[:, 0]])
        for logp_LV, row_L in zip(own, rows, strict=True)
    ]
    distance = (torch.cat(expected) - logp_T).abs().mean().item()
    if not distance <= PROBE_BOUND_NATS[model.dtype]:
        raise ModelError(
            f"models of kind {model.config.model_type!r} are not supported: logprobs of packed rows are {distance:.3g} "
            "nats from transformers' own"
        )


def load_model(
    path: Path | str, *, dtype: str = "float32", device: str = "cpu", gradient_checkpointing: Checkpointing = False
) -> PreTrainedModel:
    """Causal LM of a directory or hub name, in evaluation mode. Raises `ModelError`."""
    with _loading(path):
        config = AutoConfig.from_pretrained(path)
        refuse_unsupported(config)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=DTYPES[dtype], attn_implementation=ATTENTION, output_loading_info=True
        )
    if missing := sorted(loaded["missing_keys"]):  # transformers draws them at random
        raise ModelError(f"model {str(path)!r} lacks {len(missing)} of its tensors, such as {missing[0]}")
    model.to(device).eval()
    Forwards(model)
    refuse_different(model)
    checkpoint_layers(model, gradient_checkpointing)
    return model


def checkpoint_layers(model: PreTrainedModel, kind: Checkpointing) -> None:
    """Has layers drop their activations and compute them again in the backward pass.

    The kind `selective` keeps the outputs of `KEPT_OPERATIONS`, so that only cheap operations run again; False
    changes nothing.
    """
    if not kind:
        return
    options: dict[str, object] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(KEPT_OPERATIONS))
    # Before transformers 5.23 only the older name exists; since then it warns.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)
    for module in model.modules():
        # Layers checkpoint in training mode only; their inner modules stay in evaluation mode, without dropout.
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def empty_model(
    path: Path | str, dtype: torch.dtype = torch.float32, *, few_tokens: int | None = None
) -> PreTrainedModel:
    """Causal LM in evaluation mode whose parameters have shapes but no memory; buffers are real.

    With `few_tokens` its vocabulary is so many random tokens, which take memory. Raises `ModelError`.
    """
    with _loading(path), _without_memory():
        config = AutoConfig.from_pretrained(path)
        refuse_unsupported(config)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    Forwards(model)
    if few_tokens is not None:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        with torch.random.fork_rng(devices=[]):
            model.set_input_embeddings(nn.Embedding(few_tokens, embedding.embedding_dim))
            model.set_output_embeddings(nn.Linear(head.in_features, few_tokens, bias=False))
    return model.eval()


@contextmanager
def _loading(path: Path | str) -> Iterator[None]:
    """Errors of transformers become a `ModelError` that names the model."""
    try:
        yield
    except KeyError as error:
        if error.args != (ATTENTION,):
            raise
        raise ModelError(f"model {str(path)!r} is not supported: its attention cannot be replaced") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"model {str(path)!r} cannot be loaded: {str(error).splitlines()[0]}") from error


@contextmanager
def _without_memory() -> Iterator[None]:
    """Parameters of modules made inside are on the device `meta`."""

    def emptied(_: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:  # tied parameters stay one
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def refuse_unsupported(config: object) -> None:
    """Raises `ModelError` for quantised weights, and for architectures whose attention a Layout cannot express."""
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise ModelError(
            f"weights quantised by {str(method)!r} cannot be trained: expected float32, float16 or bfloat16; "
            "dequantise the model with transformers and save it first"
        )
    if (name := getattr(config, "model_type", None)) in SAMPLED_OTHERWISE:
        raise ModelError(
            f"models of kind {name!r} are not supported: answers of the local engine have other logprobs than "
            "transformers' own"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    if foreign := kinds - LAYERS:
        raise ModelError(f"layers of kind {sorted(foreign)[0]!r} are not supported, only {', '.join(sorted(LAYERS))}")


def resolve_device(device: str) -> str:
    """Device name for `auto`, or the given name."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
