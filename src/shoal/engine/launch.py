"""The engine process as its parent starts it. Loads no torch."""

from pathlib import Path

from shoal.config import EngineConfig, ModelConfig
from shoal.net.process import Child, torch_environment


def engine_child(
    model_dir: Path,
    engine: EngineConfig,
    model: ModelConfig,
    *,
    max_model_len: int | None,
    threads: int,
    log: Path,
    version: int = 0,
    name: str = "engine",
    gpu: str | None = None,
) -> Child:
    """`python -m shoal.engine.http_server` for these settings; it prints its URL once it serves `model_dir`.

    `gpu` is the one that it sees, by its name in CUDA_VISIBLE_DEVICES; without it, those that this process sees.
    """
    arguments = [
        *("--model", str(model_dir)),
        *("--dtype", model.dtype),
        *("--device", model.device),
        *("--threads", str(threads)),
        *("--max-running", str(engine.max_running)),
        *("--max-waiting", str(engine.max_waiting)),
        *("--on-update", engine.on_update),
        *("--version", str(version)),
        *(("--max-model-len", str(max_model_len)) if max_model_len is not None else ()),
        "--die-with-parent",
    ]
    return Child(name, "shoal.engine.http_server", arguments, log, torch_environment(threads, [gpu] if gpu else []))
