"""Published models on 8, 64 and 512 GPUs, without one: the trainer itself on fake ranks (`shoal.trainer.fake_run`).

configs            each model and number of GPUs: how ranks share the weights, the memory that the planner expects of a
                   step on an H100, the memory that a fake step of that size takes, and whether it fits
starts             whether all of them were made, and took a forward and a backward pass
syncs_in_hot_path  numbers that the host read from the device in these passes: a fake tensor has none, so the first one
                   would have ended its run

What this checkout cannot measure is null. `python -m benchmarks.gpus NAME...` measures some models alone.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from benchmarks import Report, say
from benchmarks.published_models import PUBLISHED, shortened
from shoal.config import Config, parse
from shoal.errors import ConfigError
from shoal.run.machine.memory import asked_child, fitted, memory_of_gpu, question_of, trainer_mesh
from shoal.trainer.fake_run import ShapesOnly
from shoal.types import Json

GPU = "h100"
PER_HOST = 8
COUNTS = (8, 64, 512)
ROW_TOKENS = 8192


def measure(quick: bool, names: Sequence[str] = ()) -> Report:
    """Measures all models whole, or with `quick` one of them with two layers."""
    configs = []
    chosen = {"Qwen3-30B-A3B": shortened("Qwen3-30B-A3B", 2)} if quick else PUBLISHED
    for name, settings in chosen.items():
        for count in COUNTS[: 1 if quick else None]:
            if not names or name in names:
                configs.append(_measured(name, settings, count))
                say(str(configs[-1]))
    return {
        "configs": configs,
        "starts": all(one["error"] is None for one in configs),
        "syncs_in_hot_path": sum("DataDependent" in str(one["error"]) for one in configs),
        "publish_wait_s": None,
        "restore_bytes_over_checkpoint": None,
        "backends": None,
    }


def _measured(name: str, settings: Mapping[str, Json], count: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="shoal-gpus-") as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(settings))
        config, gpu_bytes = _config(path, count), memory_of_gpu(GPU)
        shapes = {name: list(shape) for name, shape in ShapesOnly.of_config(path).shapes.items()}
        mesh = trainer_mesh(config, shapes, gpu_bytes)
        found: dict[str, object] = {
            "model": name,
            "parameters": sum(map(prod, shapes.values())),
            "gpus": count,
            "mesh": f"{count // mesh.shard} x {mesh.shard}",
            "planned_gb": None,
            "fake_gb": None,
            "fits": False,
            "error": None,
        }
        try:
            fitting, fit = fitted(config, path, mesh, ROW_TOKENS, gpu_bytes)
            (taken,) = asked_child(question_of(fitting, path, mesh, ROW_TOKENS, gpu_bytes, (fit.tokens,)))
        except ConfigError as error:
            told = str(error)
            return {**found, "advice" if "fits its GPUs" in told else "error": told}
        return {
            **found,
            "micro_batch_tokens": fit.tokens,
            "gradient_checkpointing": fit.checkpointing,
            "planned_gb": round(fit.taken.peak / 1e9, 2),
            "fake_gb": round(taken.peak / 1e9, 2),
            "fits": True,
        }


def _config(path: Path, count: int) -> Config:
    """Defaults, with ranks on hosts of eight GPUs."""
    return parse(
        {
            "run_dir": str(path / "run"),
            "model": {"path": str(path), "dtype": "bfloat16"},
            "tasks": [{"name": "gcd"}],
            "cluster": {"listen": "127.0.0.1:0", "trainer": {"hosts": count // PER_HOST, "gpus": PER_HOST}},
        }
    )


if __name__ == "__main__":
    print(json.dumps(measure(False, sys.argv[1:])))
