"""An engine of another host answers for a run over a link of 50 Mbit/s and 100 ms, and over one without limits.

The engine's host has namespaces of its own (`benchmarks.hosts`). SmolLM2 learns sums on this host. Its file has
bfloat16, as checkpoints of models have, so the engine that has pulled it gets each Version as a difference to it.
It decodes few answers at once, so that the run waits for it: of an engine that waits for the trainer, idle time says
nothing about the link.
Shares are of the time after the first step, in which the engine starts on nothing, and of the time after later ones.

busy             share of the time in which the engine computes, over all steps but the first one
busy_later       the same after `FIRST_STEPS` steps
busy_share       `busy` over the slow link, over that over the other; `busy_share_later` of `busy_later`
steps_ratio      steps per second over the slow link, over those over the other, after `FIRST_STEPS` steps
staleness_max    largest staleness of what was trained
gate_closed      share of the time in which the staleness bound keeps the engine from new groups
load_s           seconds from the end of a Version's file until the engine computes with it
full_s           seconds that a whole Version of `full_bytes` would need on the slow link
"""

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks import Report, child_environment, say
from benchmarks.hosts import HEAD, UNSHARED, Namespaces, can_isolate
from benchmarks.processes import reported
from benchmarks.slow_link import SlowLink
from shoal.config import to_toml
from shoal.errors import ShoalError
from shoal.files import MODEL_FILE
from shoal.model.quantised import SMOLLM2
from shoal.model.renderer_loading import local_directory
from shoal.net.client import TOKEN_VARIABLE
from shoal.run.commands.demo import real_config

RATE_BIT_PER_S, ROUND_TRIP_S = 50e6, 0.1
STEPS, QUICK_STEPS, FIRST_STEPS, AT_ONCE = 16, 8, 4, 4
PATIENCE_S = 3600.0


class FarHosts(Namespaces):
    """One host, behind a slow link."""

    link: SlowLink

    def _connect(self, number: int, pid: int) -> None:
        self.link = SlowLink("near", "far", RATE_BIT_PER_S, ROUND_TRIP_S)
        self.link.hand_over(pid, "eth0")
        subprocess.run(["ip", "addr", "add", f"{HEAD}/24", "dev", "near"], check=True)
        subprocess.run(["ip", "link", "set", "near", "up"], check=True)


def measure(quick: bool) -> Report:
    """Runs both; `quick` takes fewer steps."""
    if not can_isolate():
        raise ShoalError("bench links: expected root, for the namespaces of its host, got another user")
    steps = QUICK_STEPS if quick else STEPS
    found: dict[str, Any] = {}
    for name in ("direct", "slow"):
        command = [*UNSHARED, sys.executable, "-m", "benchmarks.links", name, str(steps)]
        found[name] = reported(command, f"the run over the link {name!r}")
        say(f"{name}: {found[name]}")
    full_bytes = found["slow"].pop("full_bytes")
    return {
        "rate_mbit_per_s": RATE_BIT_PER_S / 1e6,
        "round_trip_ms": ROUND_TRIP_S * 1e3,
        "steps": steps,
        "busy_share": found["slow"]["busy"] / found["direct"]["busy"],
        "busy_share_later": found["slow"]["busy_later"] / found["direct"]["busy_later"],
        "steps_ratio": found["direct"]["step_s"] / found["slow"]["step_s"],
        **found,
        "full_bytes": full_bytes,
        "full_s": 8 * full_bytes / RATE_BIT_PER_S,
    }


def main(name: str, steps: int) -> Report:
    """Measures one run in this process, which has namespaces of its own."""
    with tempfile.TemporaryDirectory(prefix="shoal-links-") as folder:
        run_dir, token = Path(folder) / "run", secrets.token_urlsafe(16)
        if name == "direct":
            Namespaces.bridge()
        else:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        listen = f"{HEAD}:8200"
        words = [sys.executable, "-m", "shoal.cli", "engine", "join", f"http://{listen}", "--threads=1"]
        hosts = (FarHosts if name == "slow" else Namespaces)(lambda _: ["env", f"{TOKEN_VARIABLE}={token}", *words])
        hosts.add()
        few = f"engine.max_running={AT_ONCE}"
        overrides = [f"train.steps={steps}", "eval.questions=4", "engine.count=0", few]
        model = _in_bfloat16(local_directory(SMOLLM2), Path(folder) / "model")
        config = real_config(run_dir, 0, [*overrides, f"cluster.listen={listen}", f"model.path={model}"])
        file = run_dir.with_suffix(".toml")
        file.write_text(to_toml(config))
        command = [sys.executable, "-m", "shoal.cli", "train", str(file), "--json"]
        environment = {**child_environment(), TOKEN_VARIABLE: token}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        if process.wait(PATIENCE_S):
            raise ShoalError(f"the run ended with {process.returncode}")
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return _figures([one for one in records if one["kind"] == "step"], run_dir)


def _in_bfloat16(model_dir: Path, target: Path) -> Path:
    """Copy of a model whose file has bfloat16."""
    shutil.copytree(model_dir, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {name: one.bfloat16() for name, one in load_file(model_dir / MODEL_FILE).items()}
    save_file(tensors, target / MODEL_FILE, metadata={"format": "pt"})
    return target


def _figures(steps: list[dict[str, Any]], run_dir: Path) -> Report:
    later = steps[FIRST_STEPS:]
    return {
        "busy": _busy(steps, "engine_busy", 1),
        "busy_later": _busy(steps, "engine_busy", FIRST_STEPS),
        "trainer_busy": _busy(steps, "trainer_busy", FIRST_STEPS),
        "gate_closed": _busy(steps, "gate_closed", FIRST_STEPS),
        "staleness_max": max(one["staleness_max"] for one in steps),
        "load_s": fmean(one["load_s"] for one in later),
        "step_s": (later[-1]["time_s"] - steps[FIRST_STEPS - 1]["time_s"]) / len(later),
        "full_bytes": sum(file.stat().st_size for file in (run_dir / "model").glob("*.safetensors")),
    }


def _busy(steps: list[dict[str, Any]], name: str, first: int) -> float:
    """Share of the time since step `first`; each step tells the share of its own time, and steps last 1 s to 10 s."""
    took = [float(one["time_s"] - before["time_s"]) for before, one in pairwise(steps[first - 1 :])]
    busy_s = [float(one[name]) * s for one, s in zip(steps[first:], took, strict=True)]
    return sum(busy_s) / sum(took)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
