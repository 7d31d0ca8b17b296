"""Models in the quantised forms in which others publish theirs."""

import json
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel

from shoal.run.demo_model.architecture import Shape, save, untrained

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"


def gguf_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` is `blk.0.ffn_up.weight`."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """Byte-level tokens of ASCII; the last one ends an answer."""
    config = model.config
    writer = GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    letters = [*map(chr, range(33, 127)), "ab"]
    tokens = [*letters, *(f"<{i}>" for i in range(config.vocab_size - len(letters)))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(letters) + [3] * (len(tokens) - len(letters)))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_pad_token_id(len(tokens) - 1)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(gguf_name(name), tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Values of the sixteen codes of E2M1, in the Microscaling specification of the Open Compute Project."""


def save_as_mxfp4(model: GptOssForCausalLM, path: Path) -> None:
    """Saves a model as GPT-OSS is published; its experts take the values of random codes and scales."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, weight_EIO in list(tensors.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inward, outward = weight_EIO.shape
            codes_EOI = torch.randint(16, (experts, outward, inward), dtype=torch.uint8)
            scales = torch.randint(120, 126, (experts, outward, inward // 32), dtype=torch.uint8)
            values = FP4[codes_EOI.long()] * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
            weight_EIO.copy_(values.transpose(1, 2))
            model.get_parameter(name).data.copy_(weight_EIO)
            blocks = codes_EOI[..., ::2] | codes_EOI[..., 1::2] << 4  # the earlier value is in the lower half
            tensors[f"{name}_blocks"] = blocks.reshape(experts, outward, inward // 32, 16)
            tensors[f"{name}_scales"] = scales
            del tensors[name]
    model.save_pretrained(path)
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    method = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": method}))


def published_gpt_oss(path: Path) -> GptOssForCausalLM:
    """Saves a model as `save_as_mxfp4` does, with a tokenizer and a template."""
    save(untrained(Shape(width=32, feed_forward=64), seed=3), path)  # for its tokenizer and template
    shape = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GptOssForCausalLM(GptOssConfig(vocab_size=128, **shape, **heads)).to(torch.bfloat16)
        save_as_mxfp4(model, path)
    return model
