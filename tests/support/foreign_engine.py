"""What is asked of engines that are not ours: whether each token was drawn by the weights of its version."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from shoal.engine.detect_server import connect
from shoal.engine.external_server import ForeignEngine
from shoal.engine.weight_loading import weight_file
from shoal.interfaces import Engine
from shoal.model.loading import load_model
from shoal.model.packed import packed_logprobs
from shoal.types import Completion, Sampling
from until import until

BOUND_NATS = 1e-4


def asked(url: str, model: Path, body: Callable[[ForeignEngine], Awaitable[None]], on_update: str) -> None:
    """Runs `body` with an engine that serves the model as version 0."""

    async def run() -> None:
        sampling = Sampling(8, temperature=0.7, top_k=5)
        engine = await connect(url, on_update=on_update, model_dir=model, sampling=sampling)
        assert isinstance(engine, ForeignEngine)
        try:
            await body(engine)
        finally:
            await engine.aclose()

    asyncio.run(run())


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
