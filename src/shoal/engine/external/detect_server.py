"""Detection of the engine at a URL: Shoal's own, vLLM or SGLang."""

import contextlib
import os
from pathlib import Path

import msgspec

from shoal.engine.external.external_server import ForeignEngine
from shoal.engine.external.server_adapter import Models
from shoal.engine.external.sglang import SGLang
from shoal.engine.external.vllm import VLLM
from shoal.engine.pool.answers import MOST_TOKENS
from shoal.engine.pool.replica import PoolEngine
from shoal.engine.server.http_client import TOKEN_VARIABLE, HttpEngine
from shoal.errors import ConfigError, EngineUnavailable
from shoal.interfaces import EngineInfo
from shoal.model.file_sizes import router_experts, sizes_of
from shoal.net.client import UNREADABLE, Client, words
from shoal.types import Sampling

PROBE_TIMEOUT_S = 30.0
ADAPTERS: dict[str, type[VLLM] | type[SGLang]] = {"vllm": VLLM, "sglang": SGLang}


async def connect(
    url: str,
    *,
    on_update: str,
    model_dir: Path,
    sampling: Sampling,
    adapters: bool = False,
    routing: bool = False,
) -> PoolEngine:
    """Connects to the engine at `url`, which then serves a run's weights, or with `adapters` its adapters.

    With `routing` answers have the experts of their tokens where the server tells them.

    A vLLM or SGLang server that served another run is given the model in `model_dir`. It is also checked to sample as
    `sampling` says. Raises `ConfigError`, or `EngineUnavailable` when no server answers.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    async with contextlib.aclosing(Client(url, token=token, timeout_s=PROBE_TIMEOUT_S)) as client:
        status, data = await client.status("GET", "/info")
        if status == 401:
            raise ConfigError(f"engine.urls: {url} wants its token; set {TOKEN_VARIABLE}")
        if status == 200:
            with contextlib.suppress(*UNREADABLE):
                msgspec.json.decode(data, type=EngineInfo)
                return HttpEngine(url, token=token)
        status, data = await client.status("GET", "/v1/models")
    if status >= 500:
        raise EngineUnavailable(f"{url} answered HTTP {status}: {words(data)}")
    owner = ""
    if status == 200:
        with contextlib.suppress(*UNREADABLE, IndexError):
            owner = msgspec.json.decode(data, type=Models).data[0].owned_by
    if owner not in ADAPTERS:
        expected = "a Shoal engine, vLLM or SGLang"
        raise ConfigError(f"engine.urls: expected {expected} at {url}, got another server")
    vocabulary = sizes_of(model_dir).vocab_size or MOST_TOKENS
    adapter = ADAPTERS[owner](url, token, vocabulary, router_experts(model_dir) if routing else None)
    return await ForeignEngine.start(
        adapter, on_update=on_update, model_dir=model_dir, sampling=sampling, adapters=adapters
    )
