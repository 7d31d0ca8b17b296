"""Clients of a Tinker server with the real package, and steps of theirs on one row."""

import asyncio
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import tinker
import torch
from tinker import types

from tinker_server import TinkerServer

TOKENS = [40, 41, 42, 50, 51, 43, 60]
TIMEOUT_S = 240
CLOSE_S = 10


@contextmanager
def client_of(server: TinkerServer, key: str) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=server.url, api_key=key)
    try:
        yield client
    finally:
        holder = client.holder
        try:
            holder.run_coroutine_threadsafe(holder.aclose()).result(CLOSE_S)
        except TimeoutError:  # the package's heartbeat does not always hear that it shall end
            for pool in holder._client_pools.values():
                holder.run_coroutine_threadsafe(pool.close()).result(CLOSE_S)
        holder.run_coroutine_threadsafe(connections_closed()).result(CLOSE_S)
        del holder
        del client
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()


async def connections_closed() -> None:
    """Closes the connections of the package's loop, of which it forgets some when a client ends amid a poll."""
    for transport in list(asyncio.get_running_loop()._transports.values()):  # type: ignore[attr-defined]
        transport.abort()


def trained(service: tinker.ServiceClient, rank: int = 4) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model="tiny", rank=rank, seed=1).result(TIMEOUT_S)


def datum(tokens: list[int] = TOKENS, **inputs: list[float] | torch.Tensor) -> types.Datum:
    given = inputs or {"weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], **given})


def logprobs(client: tinker.TrainingClient, tokens: list[int] = TOKENS) -> list[float]:
    output = client.forward([datum(tokens)], "cross_entropy").result(TIMEOUT_S)
    return list(output.loss_fn_outputs[0]["logprobs"].data)


def stepped(client: tinker.TrainingClient, count: int = 1) -> list[float]:
    """Losses of so many steps on one datum."""
    losses = []
    for _ in range(count):
        forward = client.forward_backward([datum()], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)
        losses.append(forward.result(TIMEOUT_S).metrics["loss:sum"])
    return losses
