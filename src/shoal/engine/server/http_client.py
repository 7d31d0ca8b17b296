"""Client of an engine process, `interfaces.Engine` over HTTP, and the start of one. Loads no torch."""

import secrets
from base64 import b64decode
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Self

from shoal.config import EngineConfig, ModelConfig
from shoal.engine.server import protocol
from shoal.errors import EngineUnavailable, WrongAnswer
from shoal.interfaces import EngineInfo, LogitRules, ServedToken, ServedTokens
from shoal.net.client import Client, words
from shoal.net.process import Child, torch_environment
from shoal.types import Completion, FinishReason, Sampling

TOKEN_VARIABLE = "SHOAL_ENGINE_TOKEN"
"""Environment variable with the token of engines that a run did not start itself."""
ANSWER_TIMEOUT_S = 3600.0
"""Seconds of an answer of tens of thousands of tokens from a full engine; its pool checks the engine meanwhile."""
CONTROL_TIMEOUT_S = 30.0
"""Seconds of a question about the engine's state, and of a command that it carries out at once."""
REFUSALS = (400, 413)  # any other 4xx comes from a proxy in front of the engine


class HttpEngine:
    """Engine behind HTTP. Close it with `aclose`.

    Requests that never reached the engine or lost their connection are retried a few times. Errors that the engine
    answered are not.
    """

    def __init__(self, url: str, *, token: str = "", timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """`timeout_s` bounds the wait for one answer, queueing included; other calls have a bound for control."""
        self._url = url
        self._client = Client(url, token=token, timeout_s=timeout_s, refusals=REFUSALS)
        self._control = Client(url, token=token, timeout_s=min(timeout_s, CONTROL_TIMEOUT_S), refusals=REFUSALS)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.aclose()
        await self._control.aclose()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        n: int = 1,
        priority: int = 0,
        session: str = "",
        adapter: str = "",
    ) -> list[Completion]:
        """Implements `Engine` and `PoolEngine`: one engine serves all sessions."""
        params = protocol.SamplingParams(**asdict(sampling), n=n)
        body = protocol.GenerateRequest(list(prompt_ids), params, priority=priority, model=adapter or None)
        answer = await self._client.ask("POST", "/inference/v1/generate", protocol.GenerateResponse, body)
        if [choice.index for choice in answer.choices] != list(range(n)):
            raise WrongAnswer(f"{self._url} gave {len(answer.choices)} completions, expected 0 to {n - 1} in order")
        try:
            return [_completion(choice) for choice in answer.choices]
        except ValueError as error:
            raise WrongAnswer(f"{self._url} gave an answer that cannot be: {error}") from error

    async def scored(
        self, token_ids: Sequence[int], others: int | list[list[int]] = 0, *, adapter: str = ""
    ) -> protocol.ScoreResponse:
        """Implements `PoolEngine`."""
        body = protocol.LogprobsRequest(list(token_ids), others, adapter or None)
        return await self._client.ask("POST", "/score", protocol.ScoreResponse, body)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, rules: LogitRules, *, every: int
    ) -> AsyncGenerator[ServedTokens, None]:
        """Implements `interfaces.ModelServer`."""
        body = protocol.StreamRequest(list(prompt_ids), protocol.SamplingParams(**asdict(sampling)), rules, every)
        async with aclosing(self._client.lines("/stream", ServedTokens, body)) as lines:
            async for tokens in lines:
                yield tokens
                if tokens.finish_reason is not None:
                    return
        raise EngineUnavailable(f"{self._url} ended an answer without a reason")

    async def prompt_logprobs(self, token_ids: Sequence[int], top: int) -> list[ServedToken]:
        """Implements `interfaces.ModelServer`."""
        scored = await self.scored(token_ids, top)
        tops = scored.others or [[]] * len(scored.logprobs)
        if not len(scored.logprobs) == len(tops) == len(token_ids) - 1:
            raise EngineUnavailable(f"{self._url} gave {len(scored.logprobs)} logprobs for {len(token_ids)} tokens")
        # One value for a token that is among the most likely: harnesses compare the two for equality.
        rows = zip(token_ids[1:], scored.logprobs, tops, strict=True)
        return [ServedToken(token, dict(best).get(token, logprob), tuple(best)) for token, logprob, best in rows]

    async def update_weights(self, version: int, path: Path) -> None:
        """Loads the safetensors file (or directory) at `path`; returns once the engine serves it or a newer version."""
        body = protocol.UpdateWeightsRequest(version, _absolute(path))
        await self._client.ask("POST", "/update_weights", protocol.WeightInfo, body)

    async def load_adapter(self, name: str, version: int, path: Path) -> dict[str, int]:
        """Loads an adapter (a directory in the form of peft) under a name; returns the Versions of all by name."""
        body = protocol.LoadAdapterRequest(name, _absolute(path), version)
        return (await self._client.ask("POST", "/v1/load_lora_adapter", protocol.LoadedAdapters, body)).adapters

    async def unload_adapter(self, name: str) -> dict[str, int]:
        """Forgets an adapter; answers that it is giving end with what they have."""
        body = protocol.UnloadAdapterRequest(name)
        return (await self._client.ask("POST", "/v1/unload_lora_adapter", protocol.LoadedAdapters, body)).adapters

    async def info(self) -> EngineInfo:
        """State of the engine."""
        return await self._control.ask("GET", "/info", EngineInfo)

    async def alive(self) -> None:
        """Returns when the engine answers. Raises `EngineUnavailable` otherwise."""
        status, answer = await self._control.status("GET", "/health")
        if status != 200:
            raise EngineUnavailable(f"{self._url} answered HTTP {status} on /health: {words(answer)}")

    async def pause(self, mode: str = "abort") -> None:
        """Pauses: `abort` ends requests now, `wait` lets them finish, `keep` lets them stand still."""
        await self._control.ask("POST", f"/pause?mode={mode}", protocol.PausedState)

    async def resume(self) -> None:
        """Ends a pause."""
        await self._control.ask("POST", "/resume", protocol.PausedState)

    async def paused(self) -> bool:
        """Whether the engine is paused."""
        return (await self._control.ask("GET", "/is_paused", protocol.PausedState)).is_paused

    async def abort(self) -> None:
        """Ends all requests and returns their sampled tokens."""
        await self._control.post("/abort_requests", {})


class PullingEngine(HttpEngine):
    """Engine of another host, which pulls each Version from the run."""

    async def pull(self, version: int) -> None:
        """Returns once the host has the Version's files; the engine keeps its weights."""
        await self._client.post("/pull_weights", protocol.UpdateWeightsRequest(version))

    async def update_weights(self, version: int, path: Path) -> None:
        """Returns once the engine serves the Version; the path is the run's own, and is not sent."""
        await self._client.post("/update_weights", protocol.UpdateWeightsRequest(version))

    async def load_adapter(self, name: str, version: int, path: Path) -> dict[str, int]:
        """Loads the adapter that is a Version under a name; returns the Versions of all adapters by name."""
        body = protocol.LoadAdapterRequest(name, "", version)
        return (await self._client.ask("POST", "/v1/load_lora_adapter", protocol.LoadedAdapters, body)).adapters


def _absolute(path: Path) -> str:
    return str(path.absolute())


def _completion(choice: protocol.GeneratedChoice) -> Completion:
    entries = choice.logprobs.content if choice.logprobs else []
    if [entry.token_id for entry in entries] != choice.token_ids:
        raise ValueError("logprobs: expected one for each of token_ids, in order, got those of other tokens")
    return Completion(
        tuple(choice.token_ids),
        tuple(entry.logprob for entry in entries),
        protocol.versions_of(choice.weight_versions or [], len(choice.token_ids)),
        FinishReason(choice.finish_reason),
        b64decode(choice.routing),
        tuple(choice.forced),
        tuple(choice.kept),
    )


PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512"}
"""Compiled products that an engine keeps: four for each number of rows, and two of attention. With 128 it compiled
products of a small model again, in a tenth of its time."""


class EngineChild(Child):
    """Engine process. The parent sends the token of its routes over the socket, where no other process can read it."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._token = secrets.token_urlsafe(24)
        self.send(self._token.encode())
        return self

    async def serving(self, timeout_s: float) -> HttpEngine:
        """Waits until the engine serves, and returns its client. Raises `ChildDied`."""
        return HttpEngine((await self.ready(timeout_s)).decode(), token=self._token)


def engine_child(
    model_dir: Path,
    engine: EngineConfig,
    model: ModelConfig,
    *,
    max_model_len: int | None,
    threads: int,
    log: Path,
    name: str = "engine",
    gpu: str | None = None,
    weights: Path | None = None,
    record_routing: bool = False,
) -> EngineChild:
    """Child that runs `python -m shoal.engine.server.http_server`.

    It loads weights from `model_dir` or below `weights`.

    `gpu` names the visible GPU, as in CUDA_VISIBLE_DEVICES; without it the child sees the GPUs of this process.
    """
    options = {
        "model": model_dir,
        "dtype": model.dtype,
        "device": model.device,
        "threads": threads,
        "max-running": engine.max_running,
        "on-update": engine.on_update,
        "max-model-len": max_model_len,
        "weights": weights,
    }
    arguments = ["--die-with-parent", *(f"--{name}={value}" for name, value in options.items() if value is not None)]
    arguments += ["--record-routing"] if record_routing else []
    environment = torch_environment(threads, [gpu] if gpu else []) | PRODUCTS
    return EngineChild(name, "shoal.engine.server.http_server", arguments, log, environment)
