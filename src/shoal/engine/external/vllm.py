"""Adapter for vLLM's HTTP server, which is never imported. Tested with 0.32.0, written for 0.28 to 0.33.

The server needs `VLLM_SERVER_DEV_MODE=1` for pause, resume and the call that reloads weights. It also needs
`--enable-scale-out` (token ids in and out) and `--logprobs-mode processed_logprobs`
(docs/guides/gpus.md).

The adapter sends no seeds: a seeded request whose prompt is computed in more than one chunk crashes 0.32.0 on a CPU
("CPU Generator does not use offset"). A long answer becomes such a request when new weights have it computed again.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from shoal.engine.external.server_adapter import (
    Abilities,
    Asked,
    HttpAdapter,
    SampledCompletion,
    StopMode,
    finish_reason,
    numbered,
)
from shoal.engine.server.protocol import GeneratedChoice, GenerateResponse
from shoal.errors import ConfigError, EngineUnavailable, RequestRefused
from shoal.net.client import words
from shoal.types import Sampling

GENERATE = "/inference/v1/generate"
NOT_SENT = frozenset({"seed", "grammar", "begun"})
NO_LOGPROB = -9999.0  # vLLM's value for a missing logprob
METRICS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:generation_tokens_total": "tokens_drawn",
    "vllm:prompt_tokens_total": "tokens_prefilled",
}
PAUSES = {
    StopMode.KEEP_AND_RECOMPUTE: "mode=keep&clear_cache=true",
    StopMode.KEEP: "mode=keep&clear_cache=false",
    StopMode.DRAIN: "mode=abort&clear_cache=true",  # drained: nothing runs any more
    StopMode.ABORT: "mode=abort&clear_cache=true",
}


class _PromptLogprob(msgspec.Struct):
    logprob: float


class _Scored(msgspec.Struct):
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _Version(msgspec.Struct):
    version: str


class _WeightInfo(msgspec.Struct):
    weight_version: str


class VLLM(HttpAdapter):
    """Implements `server_adapter.ServerAdapter` for vLLM."""

    name = "vLLM"
    metrics = METRICS
    adapter_routes = "/v1"
    _longest = 0

    async def abilities(self) -> Abilities:
        """Detects abilities by requesting each needed route, and an invalid pause mode."""
        version = (await self._client.ask("GET", "/version", _Version)).version
        if not await self._client.has_route("/collective_rpc"):
            raise ConfigError(f"engine.urls: vLLM {version} takes no weights; start it with VLLM_SERVER_DEV_MODE=1")
        probe = _generation(Asked("probe", (1,), Sampling(1)))
        status, data = await self._client.status("POST", GENERATE, probe)
        if status in (403, 404):
            raise ConfigError(
                f"engine.urls: vLLM {version} has no {GENERATE} ({words(data)}); start it with --enable-scale-out"
            )
        self._longest = await self.longest()
        keeps = await self._keeps_requests()
        status, _ = await self._client.status("POST", GENERATE, {**probe, "priority": -1})
        return Abilities(f"vLLM {version}", self._longest, keeps, keeps, priorities=status == 200)

    async def _keeps_requests(self) -> bool:
        """Whether the server refuses an unknown pause mode and lists `keep`; an older server just pauses."""
        status, data = await self._client.status("POST", "/pause?mode=probe")
        if status == 200:
            await self.resume()
        return status in (400, 422) and "keep" in words(data) and await self._client.has_route("/update_weight_version")

    async def sample(self, asked: Asked) -> list[SampledCompletion]:
        """Samples completions; only `sampling.stop_token_ids` end them, not the model's own end tokens."""
        body = _generation(asked)
        if asked.priority is not None:
            body["priority"] = -asked.priority  # lower goes first in vLLM
        if asked.salt is not None:
            body["cache_salt"] = asked.salt
        answer = await self._client.ask("POST", GENERATE, GenerateResponse, body)
        return [_completion(choice) for choice in answer.choices]

    async def score(self, token_ids: Sequence[int], adapter: str | None = None) -> list[float]:
        """Logprobs of a prompt. vLLM samples a token with them, so a row must be shorter than the context."""
        if self._longest and len(token_ids) >= self._longest:
            raise RequestRefused(f"token_ids: expected fewer than {self._longest} tokens, got {len(token_ids)}")
        named = {} if adapter is None else {"model": adapter}
        body = {"token_ids": list(token_ids), "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}, **named}
        answer = await self._client.ask("POST", GENERATE, _Scored, body)
        given = answer.prompt_logprobs or []
        if len(given) != len(token_ids):
            raise EngineUnavailable(f"vLLM gave {len(given)} prompt logprobs for {len(token_ids)} tokens")
        return [
            at[str(token)].logprob if at else NO_LOGPROB for token, at in zip(token_ids[1:], given[1:], strict=True)
        ]

    async def stop(self, how: StopMode) -> None:
        """Stops generation; with `keep`, `clear_cache` decides whether running requests compute their KV again."""
        await self._client.post(f"/pause?{PAUSES[how]}")

    async def load(self, directory: Path, version: int, how: StopMode) -> None:
        """Reads the safetensors in the workers and labels them afterwards: the label is never ahead of the weights."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._client.post("/collective_rpc", body)
        await self.label(version)

    async def version(self) -> int | None:
        """Version that labels the weights."""
        label = (await self._client.ask("GET", "/weight_info", _WeightInfo)).weight_version
        return numbered(label)

    async def label(self, version: int) -> None:
        """Labels the weights, where the server has the route."""
        if await self._client.has_route("/update_weight_version"):
            await self._client.post("/update_weight_version", {"new_version": str(version)})

    async def resume(self) -> None:
        """Resumes generation."""
        await self._client.post("/resume")

    async def abort(self) -> None:
        """Ends all requests and returns their sampled tokens."""
        await self._client.post("/abort_requests", {})


def _generation(asked: Asked) -> dict[str, object]:
    params = {
        **{name: value for name, value in asdict(asked.sampling).items() if name not in NOT_SENT},
        "n": asked.n,
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    named = {} if asked.adapter is None else {"model": asked.adapter}
    return {"request_id": asked.name, "token_ids": list(asked.prompt_ids), "sampling_params": params, **named}


def _completion(choice: GeneratedChoice) -> SampledCompletion:
    entries = choice.logprobs.content if choice.logprobs else []
    logprobs = tuple(entry.logprob for entry in entries)
    if len(logprobs) != len(choice.token_ids) or NO_LOGPROB in logprobs:
        raise EngineUnavailable(f"vLLM gave {len(logprobs)} logprobs for {len(choice.token_ids)} tokens")
    return SampledCompletion(
        tuple(choice.token_ids), logprobs, finish_reason(choice.finish_reason), choice.weight_versions
    )
