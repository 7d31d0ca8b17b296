"""What is asked of engines that are not ours: whether each token was drawn by the weights of its version."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.engine.compute.weight_loading import weight_file
from shoal.engine.external.detect_server import connect
from shoal.engine.external.external_server import ForeignEngine
from shoal.engine.pool import canary
from shoal.errors import RequestRefused
from shoal.interfaces import Engine
from shoal.model.loading import load_model
from shoal.model.packed import packed_logprobs
from shoal.types import Completion, Sampling
from until import until

BOUND_NATS = 1e-4


def asked(
    url: str, model: Path, body: Callable[[ForeignEngine], Awaitable[None]], on_update: str, *, adapters: bool = False
) -> None:
    """Runs `body` with an engine that serves the model as version 0."""

    async def run() -> None:
        sampling = Sampling(8, temperature=0.7, top_k=5)
        engine = await connect(url, on_update=on_update, model_dir=model, sampling=sampling, adapters=adapters)
        assert isinstance(engine, ForeignEngine)
        try:
            await body(engine)
        finally:
            await engine.aclose()

    asyncio.run(run())


def adapter_version(model: Path, folder: Path, seed: int) -> tuple[Path, Path]:
    """Adapter of a Version with its canary, and a directory of the weights that it amounts to."""
    generator, rank, alpha = torch.Generator().manual_seed(seed), 4, 8.0
    merged, adapter = folder / f"merged-{seed}", folder / f"v{seed}"
    for made in (merged, adapter):
        made.mkdir(parents=True)
    tensors, parts, layers = load_file(model / "model.safetensors"), {}, set()
    for name, weight in tensors.items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj"):
            a, b = (
                torch.randn(shape, generator=generator) * 0.1
                for shape in ((rank, weight.shape[1]), (len(weight), rank))
            )
            parts[f"base_model.model.{layer}.lora_A.weight"], parts[f"base_model.model.{layer}.lora_B.weight"] = a, b
            tensors[name] = weight + alpha / rank * b @ a
            layers.add(layer.rpartition(".")[2])
    save_file(tensors, merged / "model.safetensors")
    save_file(parts, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"}
    settings |= {"lora_dropout": 0.0, "target_modules": sorted(layers), "base_model_name_or_path": str(model)}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    row = tuple(range(6, 40))
    canary.write(canary.Canary(row, tuple(logprobs(model, merged, row)), 1e-3), adapter)
    return adapter / "adapter_model.safetensors", merged


async def adapters_under_way(engine: ForeignEngine, prompt: Sequence[int], model: Path, folder: Path) -> None:
    """Loads two Versions that are adapters while answers are under way, and refuses one that lies."""
    made = [adapter_version(model, folder, seed) for seed in (1, 2)]
    merged = [model, *(weights for _, weights in made)]
    asking = [asyncio.create_task(engine.generate([*prompt, i], Sampling(100), n=2)) for i in range(4)]
    for version, (adapter, _) in enumerate(made, 1):
        await more_drawn(engine, 16, asking)
        await engine.update_weights(version, adapter)
        asking.append(asyncio.create_task(engine.generate(prompt, Sampling(40), n=2)))
    answers = [completion for task in asking for completion in await task]
    assert all(len(set(completion.versions)) == 1 for completion in answers)
    assert {completion.versions[0] for completion in answers} == {0, 1, 2}
    assert_drawn_by_its_versions(answers[0], [*prompt, 0], model, merged)
    assert_drawn_by_its_versions(answers[-1], prompt, model, merged)
    row = [*prompt, *answers[-1].token_ids]
    computed = logprobs(model, merged[2], row)
    scored = (await engine.scored(row)).logprobs
    assert max(abs(a - b) for a, b in zip(scored, computed, strict=True)) < BOUND_NATS
    assert (await engine.info()).version == 2
    lying, _ = adapter_version(model, folder, 3)
    (lying.parent / canary.FILE).write_bytes((made[0][0].parent / canary.FILE).read_bytes())
    with pytest.raises(RequestRefused, match="computes with other weights"):
        await engine.update_weights(3, lying)
    assert (await engine.generate(prompt, Sampling(2)))[0].versions == (2, 2)


async def more_drawn(engine: Engine, count: int, asked: Sequence[asyncio.Task[object]]) -> None:
    """Returns once an engine has drawn so many tokens more than it had, or all it was asked for."""
    before = (await engine.info()).tokens_drawn

    async def drawn() -> bool:
        return all(task.done() for task in asked) or (await engine.info()).tokens_drawn >= before + count

    await until(drawn)


def logprobs(model: Path, weights: Path, row: Sequence[int]) -> list[float]:
    """Of tokens 1..L-1 under some weights (a file, or its directory), as the trainer computes them."""
    loaded = load_model(model)
    loaded.load_state_dict(load_file(weight_file(weights)), strict=False)
    loaded.tie_weights()
    with torch.no_grad():
        logp_T = packed_logprobs(loaded, torch.tensor(row), [len(row)])
    return [float(logp) for logp in logp_T[1:]]


def assert_drawn_by_its_versions(
    completion: Completion, prompt: Sequence[int], model: Path, versions: Sequence[Path]
) -> None:
    """Each token's logprob is the one that the weights of its version give it after all tokens before it."""
    row = [*prompt, *completion.token_ids]
    by_version = {v: logprobs(model, versions[v], row)[len(prompt) - 1 :] for v in set(completion.versions)}
    for i, (logprob, version) in enumerate(zip(completion.logprobs, completion.versions, strict=True)):
        assert abs(logprob - by_version[version][i]) < BOUND_NATS, (i, version)
