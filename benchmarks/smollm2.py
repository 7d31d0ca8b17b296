"""SmolLM2-135M in bfloat16 against the time of its matrix products alone: `--model smollm2` of two benches.

    shoal bench engine --model smollm2   decoding, by rows at once, beside transformers' ways to generate, and vLLM's
    shoal bench trainer --model smollm2  one training step of packed rows

share_of_gemm_limit   time of the matrix products alone over the time of the whole, both the best of rounds in turn

The products are those of the linear layers, as the model has them, on random activations: no attention, no norms, no
sampling, no loss. Decoding counts them with weights in oneDNN's blocks, as the engine has them, or plain, whichever is
faster. A training step counts three of each with plain weights, forward, gradient of the input and gradient of the
weight, and the head's forward twice where the step computes it again in the backward pass. Times are processor time of
one thread, so other processes on the machine change them little.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks import on_path, say
from benchmarks.processes import reported
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.engine.compute.options import EngineLimits
from shoal.engine.compute.request import Request
from shoal.engine.compute.step_engine import StepEngine
from shoal.model import MOST_LOGITS
from shoal.model.loading import load_model
from shoal.model.prefix_tree import prefix_tree
from shoal.model.product import Product
from shoal.model.quantised import SMOLLM2
from shoal.model.renderer_loading import local_directory
from shoal.net.process import torch_environment
from shoal.trainer.packing import micro_batches
from shoal.trainer.trainer import Trainer
from shoal.types import Sample, Sampling, seed_for

Report = dict[str, object]
VLLM_PYTHON = "SHOAL_VLLM_PYTHON"
"""Environment variable with the Python of an environment that has vLLM for CPUs, such as `make test-vllm` makes."""
PROMPT_TOKENS = 32
DRAWN_TOKENS = 64
BATCHES = (8, 32)
ROUNDS = 4
GROUP = 8
GROUPS = 6
TRAIN_ROUNDS = 3


def in_own_process(name: str, quick: bool) -> Report:
    """Measures in a process with the environment of an engine or a trainer. Raises `ShoalError` without figures."""
    command = [sys.executable, "-m", "benchmarks.smollm2", name, *(["--quick"] if quick else [])]
    return reported(command, f"bench {name} --model smollm2: its process", on_path(torch_environment(1)))


def engine(quick: bool, directory: Path | None = None) -> Report:
    """Measures decoding on one thread at a number of rows, with answers of equal length."""
    torch.set_num_threads(1)
    directory = directory or local_directory(SMOLLM2)
    model = load_model(directory, dtype="bfloat16")
    weights = _linears(model)
    widths = [weight.shape[1] for weight in weights]
    plain = list(zip(widths, [partial(F.linear, weight=weight) for weight in weights], strict=True))
    in_blocks = list(zip(widths, map(Product, weights), strict=True))
    shares: dict[str, float] = {}
    rates: dict[str, float] = {}
    drawn, rounds = (8, 1) if quick else (DRAWN_TOKENS, ROUNDS)
    for batch in BATCHES[:1] if quick else BATCHES:
        say(f"batch {batch}: {rounds} rounds of each side")
        served = StepEngine(model, EngineLimits(max_model_len=512, max_running=batch))
        step_s, limit_s = [], []
        for _ in range(rounds + 1):
            limit_s += [_least_s(partial(_products, products, batch), 8) for products in (plain, in_blocks)]
            step_s.append(_decode_step_s(served, batch, drawn))
        shares[str(batch)] = min(limit_s) / min(step_s)
        rates[f"shoal/{batch}"] = batch / min(step_s)
        rates[f"gemm_limit/{batch}"] = batch / min(limit_s)
    batch = BATCHES[0] if quick else BATCHES[-1]
    rates |= _others(directory, batch, drawn, 1 if quick else ROUNDS)
    ours = rates[f"shoal whole/{batch}"]
    theirs = {name: rate for name, rate in rates.items() if name.startswith(("transformers", "vllm"))}
    return {
        "share_of_gemm_limit": shares,
        "over": {name: ours / rate for name, rate in theirs.items()},
        "tokens_per_s": rates,
        "prompt_tokens": PROMPT_TOKENS,
        "drawn_tokens": drawn,
        "dtype": "bfloat16",
        "threads": 1,
    }


def trainer(quick: bool, directory: Path | None = None) -> Report:
    """Measures a training step of groups of eight answers, on one thread."""
    torch.set_num_threads(1)
    groups = _groups(1 if quick else GROUPS)
    one = Trainer(
        directory or local_directory(SMOLLM2),
        ModelConfig(device="cpu", dtype="bfloat16"),
        TrainConfig(groups_per_step=len(groups), lr=1e-6),
    )
    layers = _linears(one.model)
    rows = [row for group in groups for row in group]
    parts = [[rows[i] for i in part] for part in micro_batches(rows, one.tokens_per_microbatch)]
    sizes = [_computed(part) for part in parts]
    step_s, limit_s = [], []
    for turn in range(1 if quick else TRAIN_ROUNDS):
        say(f"round {turn + 1}")
        limit_s.append(_seconds(lambda: _training_products(layers, sizes)))
        step_s.append(_seconds(lambda: one.step(groups, 0)))
    computed = sum(nodes for nodes, _ in sizes)
    return {
        "share_of_gemm_limit": min(limit_s) / min(step_s),
        "step_s": min(step_s),
        "gemm_s": min(limit_s),
        "computed_tokens": computed,
        "computed_tokens_per_s": computed / min(step_s),
        "rows": len(rows),
        "microbatches": len(parts),
        "dtype": "bfloat16",
        "threads": 1,
    }


def _linears(model: PreTrainedModel) -> list[Tensor]:
    """Weights [out, in] of the linear layers, in order, with those of like inputs joined; the head is the last."""
    weights = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        weights.append(torch.cat([p.weight.detach() for p in (attention.q_proj, attention.k_proj, attention.v_proj)]))
        weights.append(attention.o_proj.weight.detach())
        weights.append(torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]))
        weights.append(mlp.down_proj.weight.detach())
    return [weight.bfloat16() for weight in (*weights, model.get_output_embeddings().weight.detach())]


def _products(products: Sequence[tuple[int, Callable[[Tensor], Tensor]]], rows: int) -> None:
    """Computes one decoding step's products, each with the width of its input."""
    for width, product in products:
        product(_activations(rows, width))


def _training_products(weights: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> None:
    """Computes the products of a training step; `sizes` has nodes and predicting nodes of each micro-batch."""
    *body, head = weights
    for nodes, predicting in sizes:
        for weight in body:
            _forward_and_backward(weight, nodes, 1)
        _forward_and_backward(head, predicting, 1 if predicting * len(head) <= MOST_LOGITS else 2)


def _forward_and_backward(weight_OI: Tensor, rows: int, forwards: int) -> None:
    x_RI, gradient_RO = _activations(rows, weight_OI.shape[1]), _activations(rows, weight_OI.shape[0])
    for _ in range(forwards):
        F.linear(x_RI, weight_OI)
    gradient_RO @ weight_OI
    gradient_RO.t() @ x_RI


_KEPT: dict[tuple[int, int], Tensor] = {}


def _activations(rows: int, width: int) -> Tensor:
    """Random activations, made once for each shape."""
    if (rows, width) not in _KEPT:
        _KEPT[rows, width] = torch.randn(rows, width, dtype=torch.bfloat16)
    return _KEPT[rows, width]


def _decode_step_s(engine: StepEngine, batch: int, drawn: int) -> float:
    """Seconds of the median step in which each row gets one token."""
    for index in range(batch):
        engine.submit(Request(_prompt(index), Sampling(drawn, seed=index)))
    engine.step()
    times = []
    while not engine.idle:
        times.append(_seconds(engine.step))
    return sorted(times)[len(times) // 2]


def _others(directory: Path, batch: int, drawn: int, rounds: int) -> dict[str, float]:
    """Tokens per second of whole answers, prompts included: the engine's and those of transformers' two ways."""
    engine = StepEngine(load_model(directory, dtype="bfloat16"), EngineLimits(max_model_len=512, max_running=batch))
    plain: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    paged: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    prompts = [_prompt(index) for index in range(batch)]
    prompt_BL = torch.tensor(prompts)
    options = {"do_sample": True, "max_new_tokens": drawn, "min_new_tokens": drawn}

    def ours() -> None:
        for index, prompt in enumerate(prompts):
            engine.submit(Request(prompt, Sampling(drawn, seed=index)))
        while not engine.idle:
            engine.step()

    @torch.inference_mode()
    def generate() -> None:
        plain.generate(prompt_BL, attention_mask=torch.ones_like(prompt_BL), **options)

    def continuous() -> None:
        config = paged.generation_config
        config.do_sample, config.max_new_tokens, config.eos_token_id = True, drawn, -1
        # By default it takes nearly all of the machine's free memory.
        room = ContinuousBatchingConfig(num_blocks=2 * batch, max_batch_tokens=max(512, batch * PROMPT_TOKENS))
        found = paged.generate_batch(prompts, generation_config=config, continuous_batching_config=room)
        assert all(len(answer.generated_tokens) == drawn for answer in found.values())

    sides = {"shoal whole": ours, "transformers generate": generate, "transformers continuous": continuous}
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, side in sides.items():
            say(f"{name}, batch {batch}")
            best[name] = min(best.get(name, float("inf")), _seconds(side))
    if python := os.environ.get(VLLM_PYTHON):
        say(f"vllm, batch {batch}")
        command = [python, str(Path(__file__).with_name("vllm_side.py")), str(directory), str(rounds), str(drawn)]
        ended = subprocess.run(command, input=msgspec.json.encode(prompts), check=True, stdout=subprocess.PIPE)
        best["vllm"] = float(ended.stdout.split()[-1])
    return {f"{name}/{batch}": batch * drawn / seconds for name, seconds in best.items()}


def _computed(rows: Sequence[Sample]) -> tuple[int, int]:
    """Nodes of the rows' prefix tree, and those that predict a trained token."""
    tree = prefix_tree([row.tokens for row in rows])
    trained = [i for i, m in enumerate(m for row in rows for m in row.mask) if m]
    return len(tree.tokens), len({tree.node_of[i - 1] for i in trained})


def _groups(count: int) -> list[tuple[Sample, ...]]:
    return [
        tuple(_row(_prompt(number), GROUP * number + index, 1.0 if index % 2 else -1.0) for index in range(GROUP))
        for number in range(count)
    ]


def _row(prompt: list[int], index: int, advantage: float) -> Sample:
    answer = _tokens("answer", index, DRAWN_TOKENS)
    p, n = len(prompt), len(answer)
    return Sample(
        tokens=(*prompt, *answer),
        mask=(0,) * p + (1,) * n,
        logprobs=(0.0,) * p + (-8.0,) * n,
        versions=(-1,) * p + (0,) * n,
        advantages=(0.0,) * p + (advantage,) * n,
    )


def _prompt(index: int) -> list[int]:
    return _tokens("prompt", index, PROMPT_TOKENS)


def _tokens(kind: str, index: int, count: int) -> list[int]:
    generator = random.Random(seed_for("bench", kind, index))
    return [generator.randrange(6, 100) for _ in range(count)]  # any model has these tokens


def _least_s(run: Callable[[], object], rounds: int) -> float:
    return min(_seconds(run) for _ in range(rounds))


def _seconds(run: Callable[[], object]) -> float:
    began_s = time.process_time()
    run()
    return time.process_time() - began_s


if __name__ == "__main__":
    report = {"engine": engine, "trainer": trainer}[sys.argv[1]]("--quick" in sys.argv)
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
