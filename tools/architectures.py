"""Writes docs/reference/models.md: which causal language models of transformers are computed as published.

`python tools/architectures.py` makes a tiny random model of every architecture. Its packed logprobs, and those of
answers of the local engine, are compared with transformers' eager attention, row by row.
`python tools/architectures.py llama gemma3_text` says it of some.
"""

import inspect
import json
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shoal.engine.compute.options import EngineLimits
from shoal.engine.compute.request import Request
from shoal.engine.compute.step_engine import StepEngine
from shoal.engine.compute.weight_loading import StagedWeights
from shoal.errors import ModelError
from shoal.model.loading import load_model
from shoal.model.packed import packed_logprobs
from shoal.types import Sampling

DOC = Path(__file__).resolve().parents[1] / "docs" / "reference" / "models.md"
RAW = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "architectures.json"
BOUND_NATS = 1e-4
PATIENCE_S = 120
HEAD = """# Models

<!-- Written by `make architectures`. -->

`model.path` takes any causal language model of a computed architecture. "Computed" means that a tiny random model has
the logprobs of transformers' eager attention to 1e-4 nats. This holds in float32 for packed rows that share beginnings,
and for interrupted answers of the local engine. Each loaded model is checked again, and refused with the reason.

With transformers {version}, {computed} architectures are computed and {refused} refused. No tiny model of {unmade} more
could be made; they are checked when loaded.
[All rows with their reasons](../../benchmarks/results/architectures.json).
"""
KINDS = (
    ("compressed attention", r"layers of kind '\w*_attention"),
    ("other logprobs than transformers' own", r"nats from transformers' own"),
    ("an attention that cannot be replaced, or other errors", r""),
)
"""Groups of refusals and the pattern of their reasons, the first match counts."""
TINY = {
    "vocab_size": 97, "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embed_dim": 32,
    "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "d_ff": 48, "ffn_hidden_size": 48,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
    "expert_ffn_hidden_size": 24, "shared_intermediate_size": 24,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 4,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "attention_head_dim": 8,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64, "sliding_window": 4,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "qk_head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
    "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "rotary_dim": 4,
    "num_encoder_layers": 4, "num_decoder_layers": 4, "encoder_layers": 4, "depth": 2,
    "attention_chunk_size": 5, "floor_scale": 3, "index_topk": 3, "index_n_heads": 16, "index_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_n_heads": 4, "n_mamba_heads": 2, "mamba_d_state": 8, "mamba_d_ssm": 32, "mamba_chunk_size": 4,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "state_size": 8, "n_groups": 2,
    "chunk_size": 4, "block_size": 4, "lru_width": 32, "attention_window_size": 4,
}  # fmt: skip
KINDS_OF_LAYERS = ["linear_attention", "full_attention"] * 2
OF_TYPE: dict[str, dict[str, object]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_v2": {"head_dim": 8},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4, "layer_types": ["indexed_attention"] * 4, "per_layer_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 4},
    "granitemoehybrid": {"layer_types": KINDS_OF_LAYERS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16, "n_groups": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 2, "indexer_head_dim": 8, "indexer_budget": 4,
        "indexer_compress_ratio": 2, "layer_types": ["linear_attention", "indexed_attention"] * 2,
    },
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_mem_blocks": 2},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}  # fmt: skip
"""Settings without which a tiny model of a type is none, or lacks a kind of its layers."""
FORCED = {"head_dim", "num_key_value_heads", "intermediate_size"}


def small(default: PreTrainedConfig, *, forced: bool) -> dict[str, object]:
    """Settings of few numbers for a configuration and the configurations in it; `forced` sets unset ones too."""
    fixed = {name for name, one in inspect.getmembers(type(default), lambda member: isinstance(member, property))}
    fixed |= {name for name, meant in default.attribute_map.items() if meant in fixed}
    wanted: dict[str, object] = {
        name: value
        for name, value in TINY.items()
        if name not in fixed and (known(default, name) is not None or (forced and name in FORCED))
    }
    if known(default, "kv_lora_rank") is not None:  # latent attention has as many heads of keys as of queries
        wanted["num_key_value_heads"] = 4
    kinds = known(default, "layer_types")
    if isinstance(kinds, list) and "layer_types" not in fixed:  # four layers with every kind there is
        wanted["layer_types"] = (list(dict.fromkeys(kinds)) * 4)[:4]
    if known(default, "per_layer_config") is not None and known(default, "num_hidden_layers"):
        wanted |= {"per_layer_config": {}, "num_attention_heads": 4} | ({} if "head_dim" in fixed else {"head_dim": 8})
    for name in default.sub_configs:
        if isinstance(inner := known(default, name), PreTrainedConfig):
            wanted[name] = small(inner, forced=forced)
    return wanted | OF_TYPE.get(default.model_type, {})


def known(config: PreTrainedConfig, name: str) -> object:
    """A setting; None where a configuration has none, or another one for each layer."""
    try:
        return getattr(config, name, None)
    except (AttributeError, AmbiguousGlobalPerLayerAttributeError):
        return None


def tiny(model_type: str) -> PreTrainedModel:
    """A random model of few numbers, with a pattern of layers as long as the model is deep."""
    default = AutoConfig.for_model(model_type)
    last: Exception | None = None
    for forced in (False, True):
        try:
            config = AutoConfig.for_model(model_type, **small(default, forced=forced))
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            model(torch.tensor([[5, 6, 7]]), use_cache=False)
        except Exception as error:  # whatever a library says of a configuration that is no real one
            last = last or error
        else:
            return model
    assert last is not None
    raise last


def verdict(model_type: str) -> tuple[str, str]:
    """The word and the reason."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        try:
            theirs = tiny(model_type)
            with torch.no_grad():  # as large as those of trained models: small ones would hide what is left out
                for name, parameter in theirs.named_parameters():
                    if "sink" in name or parameter.ndim > 1:
                        parameter.normal_(0, 0.2)
            theirs.save_pretrained(folder)
            rows = [torch.randint(3, 97, (length,)) for length in (12, 9, 1)]
            rows.append(torch.cat([rows[0][:5], rows[1][:4]]))
            with torch.no_grad():
                wanted = [theirs(row[None], use_cache=False).logits[0].log_softmax(-1) for row in rows]
        except Exception as error:  # whatever a library says of a configuration that is no real one
            return "not made", f"{type(error).__name__}: {error}"
        try:
            ours = load_model(folder)
        except ModelError as error:
            return "refused", str(error).replace(f"{folder!r}", "of it")
        with torch.no_grad():
            logp_T = packed_logprobs(ours, torch.cat(rows), [len(row) for row in rows])
        worst = max(
            (found[1:] - logp_LV[range(len(row) - 1), row[1:]]).abs().max().item() if len(row) > 1 else 0.0
            for found, logp_LV, row in zip(logp_T.split([len(row) for row in rows]), wanted, rows, strict=True)
        )
        worst = max(worst, sampled_distance(ours, theirs))
    return ("computed", "") if worst <= BOUND_NATS else ("different", f"{worst:.2g} nats")


def sampled_distance(ours: PreTrainedModel, theirs: PreTrainedModel) -> float:
    """Largest distance in nats between logprobs of answers of the local engine and transformers' own.

    Long prompts are read in parts, prompts have two answers each, a new Version interrupts all, and a later turn begins
    with an earlier answer.
    """
    engine = StepEngine(ours, EngineLimits(max_model_len=60, max_running=6, chunk_tokens=11))
    prompts = [torch.randint(3, 97, (length,)).tolist() for length in (17, 1, 14)]
    requests = [Request(prompt, Sampling(8, seed=3), n=2) for prompt in prompts]
    for request in requests:
        engine.submit(request)
        engine.step()
    engine.update(StagedWeights(1, "", {}))
    while not engine.idle:
        engine.step()
    first = requests[0].drafts[0]
    requests.append(Request([*first.prompt_ids, *first.sampled, 7, 8], Sampling(8, seed=3), n=2))
    engine.submit(requests[-1])
    while not engine.idle:
        engine.step()
    distances = []
    for draft in (draft for request in requests for draft in request.drafts):
        with torch.no_grad():
            row = torch.tensor([[*draft.prompt_ids, *draft.sampled]])
            logp_LV = theirs(row, use_cache=False).logits[0].log_softmax(-1)
        own = logp_LV[range(draft.prompt_len - 1, row.shape[1] - 1), draft.sampled]
        distances.append((own - torch.tensor(draft.logprobs)).abs().max().item())
    return max(distances)


def apart(model_type: str) -> tuple[str, str]:
    """The verdict of a process of its own: what one architecture needs or breaks is nothing to the next."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=lambda: there.send(verdict(model_type)))
    child.start()
    there.close()
    try:
        if here.poll(PATIENCE_S):
            word, reason = here.recv()
            return word, reason
        return "not made", "it takes too long"
    except EOFError:
        return "not made", "its process ended"
    finally:
        child.kill()
        child.join()


def main() -> None:
    """Writes the page; ends with 1 when an accepted architecture is computed differently."""
    found = {}
    for model_type in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found[model_type] = apart(model_type)
        print(model_type, *found[model_type], flush=True)
    if sys.argv[1:]:
        return
    rows = {name: {"word": word, "reason": " ".join(why.split())[:150]} for name, (word, why) in found.items()}
    RAW.write_text(json.dumps({"transformers": transformers.__version__, "architectures": rows}, indent=1) + "\n")
    DOC.write_text(page(found, transformers.__version__))
    sys.exit("different" in [word for word, _ in found.values()])


def page(found: Mapping[str, tuple[str, str]], version: str) -> str:
    """The page of all architectures: names by verdict, refused ones by reason."""
    words = ("computed", "refused", "not made")
    computed, refused, unmade = ([name for name, (said, _) in found.items() if said == word] for word in words)
    kinds: dict[str, list[str]] = {title: [] for title, _ in KINDS}
    for name in refused:
        kinds[next(title for title, pattern in KINDS if re.search(pattern, found[name][1]))].append(name)
    lines = [HEAD.format(version=version, computed=len(computed), refused=len(refused), unmade=len(unmade))]
    lines += ["## Computed", "", _listed(computed), "", "## Refused", "", "| reason | architectures |", "|---|---|"]
    lines += [f"| {title} | {_listed(names)} |" for title, names in kinds.items() if names]
    return "\n".join([*lines, "", "## Checked when loaded", "", _listed(unmade), ""])


def _listed(names: list[str]) -> str:
    return "`" + ", ".join(names) + "`"


if __name__ == "__main__":
    main()
