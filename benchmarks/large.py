"""Peak memory with a random model of 281 million parameters and a vocabulary of 151,936, in bfloat16: part of `memory`.

step_mb          peak resident memory of a process that takes three training steps of 4,096 tokens, in rows of 256
step_bound_mb    1.25 times float32 weights, gradients and moments, and 300 MB
load_mb          peak of a process that loads the model in float32 and reads every weight
rank_load_mb     peaks of two ranks that load it, each its part
rank_load_share  the larger of these over `load_mb`
"""

import random
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import Report, on_path, say
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.errors import ShoalError
from shoal.net.listening import free_port
from shoal.net.process import torch_environment
from shoal.trainer.heap import Heap
from shoal.trainer.ranks import ALONE, Ranks, local
from shoal.trainer.trainer import Trainer
from shoal.types import Sample

STEPS, ROWS, PROMPT_TOKENS, ANSWER_TOKENS, GROUP = 3, 16, 64, 192, 4
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 2688,
    "num_hidden_layers": 16,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def measure() -> Report:
    """Measures each process alone, but the two ranks."""
    with tempfile.TemporaryDirectory(prefix="shoal-large-") as folder:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
        parameters = model.num_parameters()
        model.save_pretrained(folder)
        del model
        say("a model of 281M parameters: three steps")
        kept_mb, (step_mb,) = parameters * 16 / 1e6, _peaks_mb(folder, "step", 1)
        say("the same model: loaded by one process, then by two ranks")
        (load_mb,), ranks_mb = _peaks_mb(folder, "load", 1), _peaks_mb(folder, "load", 2)
    return {
        "parameters": parameters,
        "step_mb": step_mb,
        "step_bound_mb": 1.25 * kept_mb + 300,
        "load_mb": load_mb,
        "rank_load_mb": ranks_mb,
        "rank_load_share": max(ranks_mb) / load_mb,
    }


def _peaks_mb(folder: str, what: str, count: int) -> list[float]:
    """Peak of each of some processes that do the same together. Raises `ShoalError` when one fails."""
    environment = on_path(torch_environment(1, gathers=count > 1))
    command = [sys.executable, "-m", "benchmarks.large", folder, what, str(count), f"127.0.0.1:{free_port()}"]
    processes = [
        subprocess.Popen([*command, str(index)], env=environment, stdout=subprocess.PIPE) for index in range(count)
    ]
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise ShoalError(f"bench memory: a process of the large model ended with {[p.returncode for p in processes]}")
    return [msgspec.json.decode(lines.splitlines()[-1], type=float) for lines in said]


def main(folder: str, what: str, count: int, master: str, index: int) -> None:
    """Does one process's part and prints its peak."""
    torch.set_num_threads(1)
    ranks = Ranks(index, count) if count > 1 else ALONE
    if count > 1:
        ranks.meet(master, "cpu")
    model = ModelConfig(device="cpu", dtype="bfloat16" if what == "step" else "float32")
    trainer = Trainer(folder, model, TrainConfig(groups_per_step=ROWS // GROUP, lr=1e-6), ranks=ranks)
    if what == "step":
        heap = Heap()
        for seed in range(STEPS):
            trainer.step(_groups(random.Random(seed)), 0)
            heap.settle()
    else:  # slices of a mapped file take memory when they are read
        assert sum(float(local(one).sum()) for one in trainer.tensors().values())
    lines = Path("/proc/self/status").read_text().splitlines()
    peak_kb = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    sys.stdout.write(f"{int(peak_kb) * 1024 / 1e6}\n")


def _groups(numbers: random.Random) -> list[tuple[Sample, ...]]:
    """Groups without a prompt in common, so that every token is computed."""
    return [tuple(_row(numbers, 1.0 if i % 2 else -1.0) for i in range(GROUP)) for _ in range(ROWS // GROUP)]


def _row(numbers: random.Random, advantage: float) -> Sample:
    p, a = PROMPT_TOKENS, ANSWER_TOKENS
    return Sample(
        tokens=tuple(numbers.randrange(6, SHAPE["vocab_size"]) for _ in range(p + a)),
        mask=(0,) * p + (1,) * a,
        logprobs=(0.0,) * p + (-12.0,) * a,
        versions=(-1,) * p + (0,) * a,
        advantages=(0.0,) * p + (advantage,) * a,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
