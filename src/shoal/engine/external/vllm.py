"""Adapter for vLLM's HTTP server, which is never imported. Tested with 0.32.0, written for 0.28 to 0.33.

The server needs `VLLM_SERVER_DEV_MODE=1` for pause, resume and the call that reloads weights. It also needs
`--enable-scale-out` (token ids in and out) and `--logprobs-mode processed_logprobs`
(docs/guides/gpus.md).

Where few tokens can be sampled, these are reported: by `--return-sampling-mask`, or as the likely tokens whose logprob
is finite after top-k and top-p. Experts of each token come with `--enable-return-routed-experts`.

The adapter sends no seeds: a seeded request whose prompt is computed in more than one chunk crashes 0.32.0 on a CPU
("CPU Generator does not use offset"). A long answer becomes such a request when new weights have it computed again.
"""

import contextlib
from array import array
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from tokenize import TokenError
from typing import Annotated

import msgspec
import numpy as np

from shoal.engine.external.server_adapter import (
    Abilities,
    Asked,
    HttpAdapter,
    SampledCompletion,
    StopMode,
    finish_reason,
    numbered,
)
from shoal.engine.pool.answers import MOST_TIED
from shoal.engine.server.protocol import GeneratedChoice, TokenLogprob
from shoal.errors import ConfigError, EngineUnavailable, RequestRefused, WrongAnswer
from shoal.net.client import UNREADABLE, words
from shoal.types import MOST_KEPT, Sampling

GENERATE = "/inference/v1/generate"
NOT_SENT = frozenset({"seed", "grammar", "begun"})
NO_LOGPROB = -9999.0  # vLLM's value for a missing logprob, and for one of -inf
MOST_MASKED = 1 << 26
"""Numbers in the sampling masks of one answer that may have all tokens."""
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


class _Sampled(TokenLogprob):
    top_logprobs: Sequence[TokenLogprob] = ()


class _Logprobs(msgspec.Struct):
    content: list[_Sampled]


class _Choice(GeneratedChoice):
    logprobs: _Logprobs | None = None  # type: ignore[assignment]
    sampling_mask: list[list[int]] | None = None
    routed_experts: str | None = None
    """A file of numpy in base64: experts [L - 1, layers, k], of all layers."""


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


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
    _masks = False
    """Whether the server was started with --return-sampling-mask: it then takes no request without a `top_k`."""

    async def abilities(self) -> Abilities:
        """Detects abilities by requesting each needed route, and an invalid pause mode."""
        version = (await self._client.ask("GET", "/version", _Version)).version
        if not await self._client.has_route("/collective_rpc"):
            raise ConfigError(f"engine.urls: vLLM {version} takes no weights; start it with VLLM_SERVER_DEV_MODE=1")
        probe = self._generation(Asked("probe", (1,), Sampling(1, top_k=MOST_KEPT + 1)))
        status, data = await self._client.status("POST", GENERATE, probe)
        if status in (403, 404):
            raise ConfigError(
                f"engine.urls: vLLM {version} has no {GENERATE} ({words(data)}); start it with --enable-scale-out"
            )
        with contextlib.suppress(*UNREADABLE):
            self._masks = msgspec.json.decode(data, type=_Answer).choices[0].sampling_mask is not None
        self._longest = await self.longest()
        keeps = await self._keeps_requests()
        status, _ = await self._client.status("POST", GENERATE, {**probe, "priority": -1})
        return Abilities(f"vLLM {version}", self._longest, keeps, keeps, status == 200, grammars=True)

    async def _keeps_requests(self) -> bool:
        """Whether the server refuses an unknown pause mode and lists `keep`; an older server just pauses."""
        status, data = await self._client.status("POST", "/pause?mode=probe")
        if status == 200:
            await self.resume()
        return status in (400, 422) and "keep" in words(data) and await self._client.has_route("/update_weight_version")

    async def sample(self, asked: Asked) -> list[SampledCompletion]:
        """Samples completions; only `sampling.stop_token_ids` end them, not the model's own end tokens."""
        body = self._generation(asked)
        if asked.priority is not None:
            body["priority"] = -asked.priority  # lower goes first in vLLM
        if asked.salt is not None:
            body["cache_salt"] = asked.salt
        answer = await self._client.ask("POST", GENERATE, _Answer, body)
        return [self._completion(asked, choice) for choice in answer.choices]

    async def score(self, token_ids: Sequence[int], adapter: str | None = None) -> list[float]:
        """Logprobs of a prompt. vLLM samples a token with them, so a row must be shorter than the context."""
        if self._longest and len(token_ids) >= self._longest:
            raise RequestRefused(f"token_ids: expected fewer than {self._longest} tokens, got {len(token_ids)}")
        named = {} if adapter is None else {"model": adapter}
        params = {"max_tokens": 1, "top_k": 1, "prompt_logprobs": 0}
        body = {"token_ids": list(token_ids), "sampling_params": params, **named}
        answer = await self._client.ask("POST", GENERATE, _Scored, body)
        given = answer.prompt_logprobs or []
        if len(given) != len(token_ids):
            raise EngineUnavailable(f"vLLM gave {len(given)} prompt logprobs for {len(token_ids)} tokens")
        places = zip(token_ids[1:], given[1:], strict=True)
        try:
            return [at[str(token)].logprob if at else NO_LOGPROB for token, at in places]
        except KeyError as error:
            raise WrongAnswer(f"prompt_logprobs: expected one of token {error}") from None

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

    def _generation(self, asked: Asked) -> dict[str, object]:
        sampling = asked.sampling
        if self._masks and sampling.temperature == 0:
            sampling = replace(sampling, temperature=1.0, top_k=1)
        if self._masks and not sampling.top_k:
            if sampling.max_tokens * self._vocabulary > MOST_MASKED:
                raise RequestRefused(
                    f"top_k: expected at least 1 for {sampling.max_tokens} tokens, got 0; start vLLM without "
                    "--return-sampling-mask to sample from all tokens"
                )
            sampling = replace(sampling, top_k=self._vocabulary)
        tops = 0 if self._masks or not sampling.records_kept else sampling.top_k + MOST_TIED
        params = {
            **{name: value for name, value in asdict(sampling).items() if name not in NOT_SENT},
            "n": asked.n,
            "ignore_eos": True,
            "logprobs": min(tops, self._vocabulary),
            "detokenize": False,
        }
        if sampling.grammar:
            params["structured_outputs"] = {"grammar": sampling.grammar}
        named = {} if asked.adapter is None else {"model": asked.adapter}
        return {"request_id": asked.name, "token_ids": list(asked.prompt_ids), "sampling_params": params, **named}

    def _completion(self, asked: Asked, choice: _Choice) -> SampledCompletion:
        entries = choice.logprobs.content if choice.logprobs else []
        logprobs = tuple(entry.logprob for entry in entries)
        if len(logprobs) != len(choice.token_ids) or NO_LOGPROB in logprobs:
            raise EngineUnavailable(f"vLLM gave {len(logprobs)} logprobs for {len(choice.token_ids)} tokens")
        return SampledCompletion(
            tuple(choice.token_ids),
            logprobs,
            finish_reason(choice.finish_reason),
            choice.weight_versions,
            self._kept(choice, entries) if asked.sampling.records_kept else (),
            self._routing(choice, len(asked.prompt_ids) + len(choice.token_ids) - 1),
        )

    def _kept(self, choice: _Choice, entries: Sequence[_Sampled]) -> tuple[bytes, ...]:
        """Tokens that could be sampled at each place. Raises `EngineUnavailable` where the answer leaves some out."""
        sets = choice.sampling_mask
        if sets is None:
            sets = [[top.token_id for top in entry.top_logprobs if top.logprob > NO_LOGPROB] for entry in entries]
            counts = (len(entry.top_logprobs) for entry in entries)
            if any(len(ids) == count < self._vocabulary for ids, count in zip(sets, counts, strict=True)):
                raise EngineUnavailable(f"vLLM could sample more than {MOST_TIED} tokens beyond top_k")
        if len(sets) != len(choice.token_ids):
            raise EngineUnavailable(f"vLLM gave {len(sets)} sampling masks for {len(choice.token_ids)} tokens")
        try:
            return tuple(array("I", ids).tobytes() for ids in sets)
        except OverflowError as error:
            raise WrongAnswer(f"sampling_mask: expected tokens, got {error}") from None

    def _routing(self, choice: _Choice, positions: int) -> bytes:
        """Experts as `Completion.routing` has them; none where the server or the run records none."""
        if choice.routed_experts is None or not self._routers:
            return b""
        try:
            all_PLk = np.lib.format.read_array(BytesIO(b64decode(choice.routed_experts)), allow_pickle=False)
            experts_PLk = all_PLk[:, sorted(self._routers)]
        except (ValueError, EOFError, IndexError, MemoryError, TokenError) as error:
            raise WrongAnswer(f"routed_experts: expected those of layer {max(self._routers)}, got {error}") from error
        if all_PLk.dtype.kind not in "iu" or all_PLk.ndim != 3 or len(all_PLk) != positions:
            what = f"{all_PLk.dtype} {all_PLk.shape}"
            raise WrongAnswer(f"routed_experts: expected integers [{positions}, layers, k], got {what}")
        stored = experts_PLk.astype(np.min_scalar_type(max(self._routers.values())))
        if ((stored != experts_PLk) & (experts_PLk >= 0)).any():
            most = max(self._routers.values())
            raise WrongAnswer(f"routed_experts: expected numbers below {most}, got {experts_PLk.max()}")
        return bytes(stored.tobytes())
