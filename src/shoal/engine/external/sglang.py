"""Adapter for SGLang's HTTP server, which is never imported. Written for 0.5.6 to 0.5.23.

SGLang needs a GPU, so no test runs the real server: tests/support/sglang_contract.py follows its documented routes. The
adapter sends no seeds, because SGLang uses them in its deterministic mode only. A model's own end tokens also end an
answer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

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
from shoal.engine.server.protocol import VersionSpan
from shoal.errors import ConfigError, EngineUnavailable, RequestRefused
from shoal.net.client import words
from shoal.types import Sampling

T = TypeVar("T")

METRICS = {
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:generation_tokens_total": "tokens_drawn",
    "sglang:prompt_tokens_total": "tokens_prefilled",
}
PAUSES = {
    StopMode.KEEP_AND_RECOMPUTE: "retract",
    StopMode.KEEP: "in_place",
    StopMode.DRAIN: "abort",
    StopMode.ABORT: "abort",
}


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] = []
    weight_versions: list[VersionSpan] | None = None


class _Generated(msgspec.Struct):
    meta_info: _Meta


class _ModelInfo(msgspec.Struct):
    weight_version: str = "default"


class _ServerInfo(msgspec.Struct):
    version: str = "of unknown version"


class _Done(msgspec.Struct):
    success: bool
    message: str = ""


class SGLang(HttpAdapter):
    """Implements `server_adapter.ServerAdapter` for SGLang."""

    name = "SGLang"
    metrics = METRICS
    adapter_routes = ""

    async def abilities(self) -> Abilities:
        """Detects abilities by requesting each needed route, and an invalid pause mode."""
        version = (await self._either(("/server_info", "/get_server_info"), _ServerInfo)).version
        if not await self._client.has_route("/update_weights_from_disk"):
            raise ConfigError(f"engine.urls: SGLang {version} has no /update_weights_from_disk")
        longest = await self.longest()
        return Abilities(f"SGLang {version}", longest, True, await self._keeps_requests())

    async def _either(self, paths: tuple[str, str], kind: type[T]) -> T:
        """Answer of a route under its new name, or else its old one."""
        status, _ = await self._client.status("GET", paths[0])
        return await self._client.ask("GET", paths[0] if status == 200 else paths[1], kind)

    async def _keeps_requests(self) -> bool:
        """Whether the server refuses an unknown pause mode; an older server ignores the mode and pauses."""
        status, data = await self._client.status("POST", "/pause_generation", {"mode": "probe"})
        if status == 200:
            await self.resume()
        elif status >= 500 or status == 404:
            raise ConfigError(f"engine.urls: SGLang cannot pause: HTTP {status}: {words(data)}")
        return status != 200

    async def sample(self, asked: Asked) -> list[SampledCompletion]:
        """Samples completions; without priorities, which SGLang has per server."""
        body: dict[str, object] = {
            "rid": asked.name if asked.n == 1 else [f"{asked.name}-{i}" for i in range(asked.n)],
            "input_ids": list(asked.prompt_ids),
            "sampling_params": _params(asked.sampling, asked.n),
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if asked.salt is not None:
            body["extra_key"] = asked.salt
        if asked.adapter is not None:
            body["lora_path"] = asked.adapter
        answers = await self._client.ask("POST", "/generate", list[_Generated] | _Generated, body)  # type: ignore[arg-type]
        return [_completion(answer.meta_info) for answer in (answers if isinstance(answers, list) else [answers])]

    async def score(self, token_ids: Sequence[int], adapter: str | None = None) -> list[float]:
        """Logprobs of a prompt; SGLang samples one token with them."""
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            **({} if adapter is None else {"lora_path": adapter}),
        }
        given = (await self._client.ask("POST", "/generate", _Generated, body)).meta_info.input_token_logprobs
        if len(given) != len(token_ids) or any(logprob is None for logprob, *_ in given[1:]):
            raise EngineUnavailable(f"SGLang gave {len(given)} prompt logprobs for {len(token_ids)} tokens")
        return [logprob for logprob, *_ in given[1:] if logprob is not None]

    async def stop(self, how: StopMode) -> None:
        """Stops generation; `retract` puts running requests back into the queue, where their KV is computed again."""
        await self._client.post("/pause_generation", {"mode": PAUSES[how]})

    async def load(self, directory: Path, version: int, how: StopMode) -> None:
        """Reads the safetensors and labels them. `in_place` requests hold KV, so the cache is not flushed then."""
        body = {
            "model_path": str(directory),
            "weight_version": str(version),
            "flush_cache": how is not StopMode.KEEP,
            "abort_all_requests": False,
        }
        done = await self._client.ask("POST", "/update_weights_from_disk", _Done, body)
        if not done.success:
            raise RequestRefused(f"SGLang did not take version {version}: {done.message}")

    async def version(self) -> int | None:
        """Version that labels the weights."""
        label = (await self._either(("/model_info", "/get_model_info"), _ModelInfo)).weight_version
        return numbered(label)

    async def label(self, version: int) -> None:
        """Labels the weights. SGLang's default would abort every request."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._client.post("/update_weight_version", body)

    async def resume(self) -> None:
        """Resumes generation."""
        await self._client.post("/continue_generation", {})

    async def abort(self) -> None:
        """Ends all requests and returns their sampled tokens. SGLang's answer has no body."""
        status, data = await self._client.status("POST", "/abort_request", {"rid": "", "abort_all": True})
        if status != 200:
            raise EngineUnavailable(f"/abort_request: HTTP {status}: {words(data)}")


def _params(sampling: Sampling, n: int) -> dict[str, object]:
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "n": n,
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


def _completion(meta: _Meta) -> SampledCompletion:
    """Completion of an answer; tokens and logprobs come from one list, so their lengths agree."""
    return SampledCompletion(
        tuple(token for _, token, _ in meta.output_token_logprobs),
        tuple(logprob for logprob, _, _ in meta.output_token_logprobs),
        finish_reason(meta.finish_reason.type),
        meta.weight_versions,
    )
