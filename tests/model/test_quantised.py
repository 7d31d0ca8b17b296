"""A quantised model becomes a plain one of the same values: weights, tokenizer and template come along."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GptOssConfig, GptOssForCausalLM, Qwen2ForCausalLM

from shoal.errors import ModelError
from shoal.model.loading import load_model
from shoal.model.packed import packed_logprobs
from shoal.model.quantised import is_whole
from shoal.model.renderer_loading import load_renderer, local_directory
from shoal.run.demo_model.architecture import Shape, save, untrained
from shoal.types import Message, Role

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


def write_gguf(model: Qwen2ForCausalLM, path: Path) -> None:
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


def test_a_gguf_file_becomes_a_directory_with_the_same_weights_and_its_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = untrained(Shape(width=32, feed_forward=64), seed=3)
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "tiny.gguf"
    write_gguf(model, file)
    directory = local_directory(str(file))
    assert (directory / "config.json").is_file()
    assert local_directory(str(file.parent)) == directory, "a directory with one GGUF file stands for it"
    row_T = torch.tensor([5, 6, 7, 40, 41])
    found_T = packed_logprobs(load_model(directory), row_T, [5])
    save(model, tmp_path / "plain")
    wanted_T = packed_logprobs(load_model(tmp_path / "plain"), row_T, [5])
    torch.testing.assert_close(found_T, wanted_T)
    renderer = load_renderer(directory)
    assert (
        renderer.prompt_ids([Message(Role.USER, "x")])
        == AutoTokenizer.from_pretrained(directory)("<x>=", add_special_tokens=False).input_ids
    )
    assert renderer.stop_token_ids == (model.config.vocab_size - 1,)


def test_a_file_that_is_no_gguf_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(b"no such thing")
    with pytest.raises(ModelError, match=r"model\.gguf: expected a whole GGUF file, got one that is cut or damaged"):
        local_directory(str(tmp_path / "model.gguf"))
    assert list((tmp_path / "cache" / "shoal").iterdir()) == []
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"a \.gguf file"):
        local_directory(str(tmp_path / "model.bin"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF file of a tiny model."""
    file = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    write_gguf(untrained(Shape(width=32, feed_forward=64), seed=3), file)
    return file.read_bytes()


@given(share=st.floats(0, 1, exclude_max=True))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_gguf_file_that_is_cut_anywhere_is_not_whole(share: float, whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(whole[: int(share * len(whole))])
    assert not is_whole(tmp_path / "cut.gguf")
    (tmp_path / "whole.gguf").write_bytes(whole)
    assert is_whole(tmp_path / "whole.gguf")


@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_of_a_gguf_file_that_have_changed_raise_nothing_of_their_own(
    at: float, byte: int, whole: bytes, tmp_path: Path
) -> None:
    place = int(at * at * len(whole))  # mostly in the header
    (tmp_path / "changed.gguf").write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    assert is_whole(tmp_path / "changed.gguf") in (True, False)


def test_a_gguf_file_of_an_unknown_architecture_is_refused_in_a_sentence_after_its_progress(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "odd.gguf").write_bytes(whole.replace(b"qwen2", b"qwenX"))
    with pytest.raises(ModelError, match=r"odd\.gguf: cannot be read as a model: [^\n]+$"):
        local_directory(str(tmp_path / "odd.gguf"))
    said = capfd.readouterr().err
    assert said.startswith("reading odd.gguf (once): starting, 0 s\n")
    assert "Traceback" not in said


def test_a_directory_with_several_gguf_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match="several GGUF files"):
        local_directory(str(tmp_path))


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


def test_published_weights_of_gpt_oss_become_a_directory_of_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    published = tmp_path / "published"
    save(untrained(Shape(width=32, feed_forward=64), seed=3), published)  # for its tokenizer and template
    shape = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GptOssForCausalLM(GptOssConfig(vocab_size=128, **shape, **heads)).to(torch.bfloat16)
        save_as_mxfp4(model, published)
    directory = local_directory(str(published))
    assert directory != published
    assert local_directory(str(published)) == directory, "it is made once"
    found = load_file(directory / "model.safetensors")
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        name: (torch.bfloat16, one.shape) for name, one in model.state_dict().items()
    }
    assert all(torch.equal(one, found[name]) for name, one in model.state_dict().items())
    assert load_model(directory).config.model_type == "gpt_oss"
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    question = [Message(Role.USER, "x")]
    assert load_renderer(directory).prompt_ids(question) == load_renderer(published).prompt_ids(question)
