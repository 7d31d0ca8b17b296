"""`make gpu`: what runs on this machine's GPUs, as one page: build/gpu.md. It needs a GPU, and ends with the first
failure of a part that is no bench.

python tools/gpu_page.py [--cpu]    `--cpu` runs the same parts on the CPU, to try the page itself
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "build" / "gpu.md"
SHORT = ("--train.steps=3", "--eval.questions=8", "--eval.every_steps=0")
LAST_LINES = 25


def parts(device: str) -> Mapping[str, Sequence[str]]:
    """Commands by their title."""
    python, shoal = sys.executable, str(Path(sys.executable).with_name("shoal"))
    shared = () if device == "cpu" else ("--engine.gpus=shared",)
    runs = {
        "Tests of tests/gpu": (python, "-m", "pytest", "-q", "tests/gpu"),
        "Parity of ranks on the CPU": (python, "-m", "pytest", "-q", "tests/trainer/test_trainer_ranks.py"),
        "A run with the local engine": (
            *(shoal, "demo", f"--run-dir={ROOT / 'build' / 'gpu-run'}", f"--model.device={device}"),
            *(*shared, *SHORT, "--json"),
        ),
        "Bench: trainer": (shoal, "bench", "trainer", "--quick", "--json"),
        "Bench: engine": (shoal, "bench", "engine", "--quick", "--json"),
    }
    vllm = os.environ.get("SHOAL_VLLM_PYTHON")
    return {**runs, "vLLM": (python, "-m", "pytest", "-q", "tests/vllm")} if vllm else runs


def main(arguments: Sequence[str]) -> int:
    """Runs all parts and writes the page; returns the number of parts that failed."""
    device = "cpu" if "--cpu" in arguments else "cuda"
    listed = (
        subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        if device == "cuda"
        else "no GPU: the parts ran on the CPU"
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    page = [
        "# Shoal on these GPUs",
        "",
        listed.strip(),
        "",
        f"Commit {commit.stdout.strip()}, {time.strftime('%F %T')}.",
    ]
    failed = 0
    for title, command in parts(device).items():
        print(title, flush=True)
        began = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        failed += done.returncode != 0
        said = (done.stdout + done.stderr).strip().splitlines()[-LAST_LINES:]
        verdict = "passed" if not done.returncode else f"failed with code {done.returncode}"
        page += ["", f"## {title}: {verdict} in {time.monotonic() - began:.0f} s", "", "```", *said, "```"]
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text("\n".join(page) + "\n")
    print(PAGE)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
