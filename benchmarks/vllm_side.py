"""The vLLM side of the engine bench, run by the Python of an environment that has vLLM: SHOAL_VLLM_PYTHON.

    python vllm_side.py MODEL_DIR ROUNDS DRAWN < prompts.json

The last line has the least seconds of processor time for all prompts, sampled in one process, threads of vLLM
included.
"""

import json
import os
import sys
import time

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def main(directory: str, rounds: int, drawn: int) -> float:
    """Least seconds of processor time."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    prompts = [{"prompt_token_ids": row} for row in json.load(sys.stdin)]
    engine = LLM(directory, dtype="bfloat16", max_model_len=512, max_num_seqs=len(prompts), enable_prefix_caching=False)
    params = SamplingParams(max_tokens=drawn, min_tokens=drawn, ignore_eos=True, temperature=1.0)
    seconds = []
    for _ in range(rounds + 1):  # the first warms up
        began_s = time.process_time()
        answers = engine.generate(prompts, params, use_tqdm=False)
        seconds.append(time.process_time() - began_s)
        assert all(len(answer.outputs[0].token_ids) == drawn for answer in answers)
    return min(seconds[1:])


if __name__ == "__main__":
    sys.stdout.write(f"\n{main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))}\n")
