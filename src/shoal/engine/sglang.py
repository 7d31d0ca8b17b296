"""How SGLang's HTTP server is spoken to; SGLang itself is never imported. Written for 0.5.6 to 0.5.23.

Not run against a real SGLang here, which needs a GPU: tests/support/sglang_contract.py follows its documented routes.
Seeds are not sent (SGLang uses them in its deterministic mode only); a model's own end tokens end an answer as well.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.engine.external_server import Abilities, SampledCompletion, ServerCounters, StopMode, finish_reason
from shoal.engine.prometheus import counted
from shoal.errors import ConfigError, EngineUnavailable, RequestRefused
from shoal.net.client import Client, words
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


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] = []
    weight_versions: list[_Span] | None = None


class _Generated(msgspec.Struct):
    meta_info: _Meta


class _ModelInfo(msgspec.Struct):
    weight_version: str = "default"


class _ServerInfo(msgspec.Struct):
    version: str = "of unknown version"


class _Done(msgspec.Struct):
    success: bool
    message: str = ""


class _Model(msgspec.Struct):
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Model]


class SGLang:
    """Implements `foreign.Dialect`."""

    def __init__(self, url: str, token: str = "") -> None:
        self._asking = Client(url, token=token)

    async def abilities(self) -> Abilities:
        """By asking for each route that is needed, and for a pause that no server knows."""
        version = (await self._either(("/server_info", "/get_server_info"), _ServerInfo)).version
        if not await self._asking.has_route("/update_weights_from_disk"):
            raise ConfigError(f"engine.urls: SGLang {version} has no /update_weights_from_disk")
        longest = (await self._asking.ask("GET", "/v1/models", _Models)).data[0].max_model_len
        return Abilities(f"SGLang {version}", longest, True, await self._keeps_requests())

    async def _either(self, paths: tuple[str, str], kind: type[T]) -> T:
        """The answer under a route's new name, or else its old one."""
        status, _ = await self._asking.status("GET", paths[0])
        return await self._asking.ask("GET", paths[0] if status == 200 else paths[1], kind)

    async def _keeps_requests(self) -> bool:
        """A server that knows modes refuses the unknown one; an older one does not look and just pauses."""
        status, data = await self._asking.status("POST", "/pause_generation", {"mode": "probe"})
        if status == 200:
            await self.go_on()
        elif status >= 500 or status == 404:
            raise ConfigError(f"engine.urls: SGLang cannot pause: HTTP {status}: {words(data)}")
        return status != 200

    async def draw(
        self, name: str, prompt_ids: Sequence[int], sampling: Sampling, n: int, priority: int | None, salt: str | None
    ) -> list[SampledCompletion]:
        """`n` completions."""
        body: dict[str, object] = {
            "rid": name if n == 1 else [f"{name}-{i}" for i in range(n)],
            "input_ids": list(prompt_ids),
            "sampling_params": _params(sampling, n),
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if salt is not None:
            body["extra_key"] = salt
        answers = await self._asking.ask("POST", "/generate", list[_Generated] | _Generated, body)  # type: ignore[arg-type]
        return [_drawn(answer.meta_info) for answer in (answers if isinstance(answers, list) else [answers])]

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of a prompt; one token is drawn with them."""
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        given = (await self._asking.ask("POST", "/generate", _Generated, body)).meta_info.input_token_logprobs
        if len(given) != len(token_ids) or any(logprob is None for logprob, *_ in given[1:]):
            raise EngineUnavailable(f"SGLang gave {len(given)} prompt logprobs for {len(token_ids)} tokens")
        return [logprob for logprob, *_ in given[1:] if logprob is not None]

    async def stop(self, how: StopMode) -> None:
        """`retract` puts running requests back into the queue, so that their KV is computed again."""
        await self._asking.tell("POST", "/pause_generation", {"mode": PAUSES[how]})

    async def load(self, directory: Path, version: int, how: StopMode) -> None:
        """Reads the safetensors and names them. `in_place` requests hold KV, so the cache cannot be flushed then."""
        body = {
            "model_path": str(directory),
            "weight_version": str(version),
            "flush_cache": how is not StopMode.KEEP,
            "abort_all_requests": False,
        }
        done = await self._asking.ask("POST", "/update_weights_from_disk", _Done, body)
        if not done.success:
            raise RequestRefused(f"SGLang did not take version {version}: {done.message}")

    async def version(self) -> int | None:
        """The name of the weights, where it is a number; a server that started anew says `default`."""
        label = (await self._either(("/model_info", "/get_model_info"), _ModelInfo)).weight_version
        return int(label) if label.isdecimal() else None

    async def label(self, version: int) -> None:
        """Names the weights. Its default would abort every request."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._asking.tell("POST", "/update_weight_version", body)

    async def go_on(self) -> None:
        """Continues."""
        await self._asking.tell("POST", "/continue_generation", {})

    async def abort(self) -> None:
        """Ends all requests with what was drawn. The answer has no body."""
        status, data = await self._asking.status("POST", "/abort_request", {"rid": "", "abort_all": True})
        if status != 200:
            raise EngineUnavailable(f"/abort_request: HTTP {status}: {words(data)}")

    async def alive(self) -> None:
        """Returns when `/health` says so."""
        status, _ = await self._asking.status("GET", "/health")
        if status != 200:
            raise EngineUnavailable(f"SGLang at {self._asking.url} says HTTP {status} of its health")

    async def counters(self) -> ServerCounters | None:
        """From its Prometheus metrics, which it has with --enable-metrics."""
        status, data = await self._asking.status("GET", "/metrics")
        return ServerCounters(**counted(data.decode(errors="replace"), METRICS)) if status == 200 else None

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._asking.aclose()


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


def _drawn(meta: _Meta) -> SampledCompletion:
    """Tokens and logprobs come from the same list, so that they cannot be of different lengths."""
    spans = meta.weight_versions
    return SampledCompletion(
        tuple(token for _, token, _ in meta.output_token_logprobs),
        tuple(logprob for logprob, _, _ in meta.output_token_logprobs),
        finish_reason(meta.finish_reason.type),
        None if spans is None else tuple((span.version, span.start, span.end) for span in spans),
    )
