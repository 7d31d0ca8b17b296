"""The Tinker bench sets the server's answers, through the `tinker` package, against the same work without it.

`forward_backward` and a whole step are set against the server's own models in this process; a sample of one token has
hardly any work of its own. The client waits for each answer before its next request, as a synchronous loop does.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.model import write_bench_model
from benchmarks.processes import announced

if TYPE_CHECKING:
    from tinker import ServiceClient

Report = dict[str, object]
KEY = "tml-bench"
ROWS, TOKENS, RANK = 32, 64, 8


def measure(quick: bool) -> Report:
    """Measures the figures on one thread."""
    import tinker

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_bench_model(Path(folder) / "model")
        serve = ["-m", "shoal.cli", "serve", "tinker", f"--model=bench={folder}/model", f"--folder={folder}/server"]
        own = {"TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
        with announced([*serve, "--device", "cpu", "--port", "0"], own) as (line, _):
            service = tinker.ServiceClient(base_url=line.removeprefix("TINKER_BASE_URL="), api_key=KEY)
            return compared(service, "bench", Path(folder) / "model", rounds=3 if quick else 10)


def compared(service: "ServiceClient", name: str, model: Path, *, rounds: int) -> Report:
    """Figures of a running server, whose model `name` is the one in the directory `model`."""
    from tinker import types

    from shoal.config import ModelConfig
    from shoal.trainer.messages import Adam, Adapter, Datum, Gradient, Open
    from shoal.trainer.models import TrainedModels

    rows = [[3 + (7 * i + 5 * j) % 80 for j in range(TOKENS + 1)] for i in range(ROWS)]
    models = TrainedModels()
    models.open(Open("own", str(model), ModelConfig(device="cpu").model_dump_json(), Adapter(RANK)))
    weights = torch.ones(TOKENS).numpy().tobytes()
    ids = [torch.tensor(row, dtype=torch.int32).numpy() for row in rows]
    data = [Datum(one[:-1].tobytes(), one[1:].tobytes(), (TOKENS,), {"weights": weights}) for one in ids]
    job = Gradient("own", tuple(data), "cross_entropy", {})

    def native() -> None:
        models.accumulate([job])
        models["own"].update(Adam())

    client = service.create_lora_training_client(base_model=name, rank=RANK).result()
    ones = types.TensorData.from_torch(torch.ones(TOKENS))
    given = [
        types.Datum(
            types.ModelInput.from_ints(row[:-1]),
            {"target_tokens": types.TensorData.from_torch(torch.tensor(row[1:])), "weights": ones},
        )
        for row in rows
    ]

    def step() -> None:
        forward = client.forward_backward(given, "cross_entropy")
        client.optim_step(types.AdamParams()).result()
        forward.result()

    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(rows[0][:8])
    token = types.SamplingParams(max_tokens=1, temperature=0)
    turns: dict[str, Callable[[], object]] = {
        "step": step,
        "native_step": native,
        "forward_backward": lambda: client.forward_backward(given, "cross_entropy").result(),
        "native_forward_backward": lambda: models.accumulate([job]),
        "sample": lambda: sampler.sample(prompt, 1, token).result(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for turn_name, turn in turns.items():
            seconds[turn_name] += [_seconds(turn)][:number]  # the first round warms up
    best = {turn_name: min(found) for turn_name, found in seconds.items()}
    return {
        "sample_overhead_ms": 1e3 * best["sample"],
        "forward_backward_overhead_ms": 1e3 * (best["forward_backward"] - best["native_forward_backward"]),
        "steps_per_s_ratio_to_native": best["native_step"] / best["step"],
        "clients": 1,
    }


def _seconds(turn: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    turn()
    return time.perf_counter() - began_s
