"""Memory that a dry run plans, with the peak resident memory of real processes, for seven configurations.

planned_mb    weights, optimizer and KV cache of the engine, and of the trainer's rank that took most
measured_mb   peak: with the program, activations, logits and copies of weights
ratio         the first over the second
large                     peaks with a large vocabulary, and of ranks that load: see `benchmarks.large`
"""

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks import Report, child_environment, large, say
from shoal.config import Config
from shoal.errors import ShoalError
from shoal.model.file_sizes import shapes_of
from shoal.run.commands.demo import demo_config, real_config
from shoal.run.machine.memory import engine_bytes, trainer_mesh
from shoal.run.prepare import prepare

PROCESSES = {"trainer": "shoal.trainer.worker", "engine": "shoal.engine.server.http_server"}
SHORT = ("train.steps=2", "train.groups_per_step=2", "eval.questions=4", "eval.every_steps=0", "rollout.max_tokens=12")
"""Few tokens, so that nearly all answers have the length that the plan counts."""
CONFIGS: Mapping[str, tuple[bool, Sequence[str]]] = {
    "embedded": (False, ("train.steps=4", "eval.questions=4", "eval.every_steps=0")),
    "float32": (True, ("model.dtype=float32", *SHORT)),
    "bfloat16": (True, SHORT),
    "lora": (True, ("train.lora.rank=8", *SHORT)),
    "reference": (True, ("train.kl.coefficient=0.01", "model.gradient_checkpointing=true", *SHORT)),
    "selective": (True, ("model.gradient_checkpointing=selective", *SHORT)),
    "ranks": (True, ("train.ranks=2", *SHORT)),
}


def measure(quick: bool) -> Report:
    """Runs all configurations; `quick` runs the first alone."""
    report: Report = {}
    for name, (real, overrides) in list(CONFIGS.items())[: 1 if quick else None]:
        with tempfile.TemporaryDirectory(prefix="shoal-memory-") as folder:
            config = (real_config if real else demo_config)(Path(folder) / "run", 0, overrides)
            with prepare(config) as prepared:
                mesh = trainer_mesh(config, shapes_of(prepared.model_dir), 0)
                engine = engine_bytes(config, prepared.model_dir, prepared.row_tokens)
                planned = {"trainer": mesh.state_bytes / mesh.shard, "engine": sum(engine.values())}
            measured = _peaks(config, real, overrides)
        report[name] = {
            process: {
                "planned_mb": round(planned[process] / 1e6),
                "measured_mb": round(measured[process] / 1e6),
                "ratio": round(planned[process] / measured[process], 3),
            }
            for process in PROCESSES
        }
        say(f"{name}: {report[name]}")
    if not quick:
        report["large"] = large.measure()
    return report


def _peaks(config: Config, real: bool, overrides: Sequence[str]) -> dict[str, float]:
    """Bytes of peak resident memory by process, over a whole run."""
    options = [f"--run-dir={config.run_dir}", "--json", *(f"--{one}" for one in overrides)]
    command = [sys.executable, "-m", "shoal.cli", "demo", *(["--real"] if real else []), *options]
    peaks = dict.fromkeys(PROCESSES, 0.0)
    with tempfile.TemporaryFile() as errors:
        run = subprocess.Popen(command, env=child_environment(), stdout=subprocess.DEVNULL, stderr=errors)
        while run.poll() is None:
            for process, found in _children(run.pid):
                peaks[process] = max(peaks[process], found)
            time.sleep(0.25)
        if run.returncode:
            errors.seek(0)
            raise ShoalError(f"the run ended with {run.returncode}: {errors.read()[-400:].decode(errors='replace')}")
    return peaks


def _children(pid: int) -> list[tuple[str, float]]:
    """Kind of each computing process below another, and its peak so far in bytes."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                line = " ".join(child.cmdline())
                status = Path(f"/proc/{child.pid}/status").read_text()
                if (peak := re.search(r"VmHWM:\s+(\d+) kB", status)) is not None:
                    found += [(kind, int(peak[1]) * 1024.0) for kind, module in PROCESSES.items() if module in line]
    return found
