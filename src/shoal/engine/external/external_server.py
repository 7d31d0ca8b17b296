"""Inference servers of other projects as `interfaces.Engine`: the part that vLLM and SGLang share.

A `ServerAdapter` (vllm.py, sglang.py) holds the part that differs. The abilities found at the start decide how a server
takes new weights:

    keep the requests   pause the server with its requests, load, resume; the server reports the version of each
                        token. `on_update = "recompute"` drops the requests' KV, `"keep"` does not
    drain               wait until all requests are finished, load
    abort               the base path, which every server has: requests end with their tokens so far, new requests
                        wait, the weights are loaded; the pool sends prompt and partial answer again

With `adapters`, a Version whose file is an adapter is loaded under a separate name. Requests under
way go on with their adapter, unless `on_update = "recompute"` ends them for the pool to send again.

The canary is scored after each load. Answers with tokens of the new weights are held until the canary passes. A server
that fails the canary answers no request until it passes.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from shoal.engine.external.named_versions import NamedVersions
from shoal.engine.external.server_adapter import (
    Asked,
    SampledCompletion,
    ServerAdapter,
    StopMode,
    numbered,
)
from shoal.engine.pool import canary
from shoal.engine.server.protocol import ScoreResponse, VersionSpan, versions_of
from shoal.errors import ConfigError, EngineUnavailable, RequestRefused, WrongAnswer
from shoal.files import ADAPTER_FILE
from shoal.interfaces import EngineInfo
from shoal.types import MOST_KEPT, Completion, FinishReason, Sampling

UNKNOWN = -1
"""Version of a server that restarted, or that another client gave weights."""
CERTAIN_NATS = 0.05
"""Nats below 0: a logprob nearer to 0 has probability 1 and does not reveal the sampling parameters."""
SAME_NATS = 1e-3
PROBES = ((1, 2, 3), (3, 1), (2,))


class ForeignEngine:
    """Implements `replica.PoolEngine` on a server of another project. Make instances with `start`."""

    def __init__(self, adapter: ServerAdapter, on_update: str) -> None:
        """`on_update` is `engine.on_update`; a server that cannot keep requests takes the base path."""
        self._adapter = adapter
        self._named = NamedVersions(adapter)
        self._on_update = on_update
        self._version = 0
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loading = asyncio.Lock()
        self._loading_version: int | None = None  # the Version whose load is under way
        self._load_ended = asyncio.Event()
        self._load_ended.set()
        self._failed_loads = 0
        self._no_whole_weights = ""
        self._running = 0
        self._interruptions = 0
        self._tokens_drawn = 0
        self._busy_s, self._busy_since_s, self._info_s = 0.0, 0.0, time.monotonic()

    @classmethod
    async def start(
        cls, adapter: ServerAdapter, *, on_update: str, model_dir: Path, sampling: Sampling, adapters: bool = False
    ) -> "ForeignEngine":
        """Starts an engine that serves the model as version 0, checked to sample as `sampling` says.

        With `adapters` the server must load adapters.

        Raises `ConfigError` with the setting to change at the server, or `EngineUnavailable`.
        """
        engine = cls(adapter, on_update)
        try:
            await engine._start(model_dir, sampling)
            if adapters:
                await engine._named.start(engine.abilities.server)
        except BaseException as error:
            await engine.aclose()
            if isinstance(error, RequestRefused):
                raise ConfigError(f"engine.urls: the server refused what every run needs: {error}") from error
            raise
        return engine

    async def _start(self, model_dir: Path, sampling: Sampling) -> None:
        self.abilities = await self._adapter.abilities()
        reports_versions = await self._probe_logprobs(sampling)
        self.how = _way(self._on_update, self.abilities.keeps_requests and reports_versions)
        reported = await self._adapter.version() if self.abilities.reports_version else None
        if reported is None:
            await self._adapter.label(0)
        elif reported != 0:  # of another run
            await self._load(0, model_dir)

    async def _probe_logprobs(self, sampling: Sampling) -> bool:
        """Whether the server reports versions.

        Raises `ConfigError` when its logprobs are not those of the sampling distribution.
        """
        cold = Sampling(1, temperature=0.01, top_k=sampling.top_k)
        checks = {
            "temperature": (cold, sampling.temperature not in (0.0, 1.0)),
            "top_k": (Sampling(1, top_k=1), sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0),
        }
        reports_versions = True
        for name, (probe, needed) in checks.items():
            for prompt in PROBES:
                found = await self._adapter.sample(Asked(f"probe-{uuid4().hex}", prompt, probe))
                if [len(one.logprobs) for one in found] != [1]:
                    raise EngineUnavailable(f"{self.abilities.server} gave something else than the one token asked for")
                (sampled,) = found
                reports_versions = reports_versions and sampled.spans is not None
                (logprob,) = sampled.logprobs
                if not needed or logprob >= -CERTAIN_NATS:
                    continue
                if abs(logprob - (await self._adapter.score((*prompt, *sampled.token_ids)))[-1]) < SAME_NATS:
                    raise ConfigError(
                        f"engine.urls: the logprobs of {self.abilities.server} leave {name} out, so they are not those "
                        f"that tokens are sampled with; start vLLM with --logprobs-mode processed_logprobs, or sample "
                        f"with temperature = 1, top_p = 1, top_k = 0, min_p = 0"
                    )
        return reports_versions

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, priority: int = 0, adapter: str = ""
    ) -> list[Completion]:
        """Samples `n` completions of one prompt; an update ends a completion with `ABORT` and its tokens so far."""
        if sampling.grammar and (not self.abilities.grammars or not sampling.records_kept or sampling.begun):
            raise RequestRefused(
                f"response_format, tool_choice: {self.abilities.server} does not report which tokens a grammar forced; "
                f"vLLM does with a top_k of 1 to {MOST_KEPT}, from an answer's first token on; leave these fields out, "
                f"or use Shoal's own engine (no engine.urls)"
            )
        if adapter:
            raise self._only_own("model")
        failed_before = await self._admitted()
        version = self._version
        salt = f"v{version}" if self.how is StopMode.KEEP else None
        self._count(n)
        try:
            with self._named.used() as newest:
                ranked = priority if self.abilities.priorities else None
                asked = Asked(f"shoal-{uuid4().hex}", prompt_ids, sampling, n, ranked, salt, newest)
                answers = await self._adapter.sample(asked)
        finally:
            self._count(-n)
        stops = sampling.stop_token_ids
        completions = [_stopped(self._completion(one, version, adapted=newest is not None), stops) for one in answers]
        while self._loading_version is not None and any(self._loading_version in c.versions[-1:] for c in completions):
            await self._load_ended.wait()
        self._assert_whole(failed_before)
        self._tokens_drawn += sum(len(completion.token_ids) for completion in completions)
        return completions

    async def _admitted(self) -> int:
        """Waits until requests may be sent, and returns how many loads have failed.

        Raises `EngineUnavailable` after a failed load.
        """
        await self._may_send.wait()
        if self._no_whole_weights:
            raise EngineUnavailable(self._no_whole_weights)
        return self._failed_loads

    def _assert_whole(self, failed_before: int) -> None:
        """Raises `EngineUnavailable` when a load has failed since: the weights that computed the answer are unknown."""
        if self._failed_loads != failed_before:
            raise EngineUnavailable(self._no_whole_weights or "weights came meanwhile that were not whole")

    def _completion(self, sampled: SampledCompletion, version: int, *, adapted: bool) -> Completion:
        count = len(sampled.token_ids)
        spans = sampled.spans
        if adapted or spans is None:  # the server's own label is that of the weights below
            if not adapted and self._version != version and sampled.finish_reason is not FinishReason.ABORT:
                raise EngineUnavailable("an answer overtook new weights; the weights that sampled it are unknown")
            spans = [VersionSpan(version, 0, count)] if count else []
        for span in spans:
            _check_label(span.version)
        try:
            streams = sampled.token_ids, _rounded(sampled.logprobs), versions_of(spans, count)
            return Completion(*streams, sampled.finish_reason, sampled.routing, kept=sampled.kept)
        except ValueError as error:
            raise WrongAnswer(f"{self.abilities.server} gave an answer that cannot be: {error}") from error

    async def scored(
        self, token_ids: Sequence[int], others: int | list[list[int]] = 0, *, adapter: str = ""
    ) -> ScoreResponse:
        """Implements `PoolEngine`. Raises `RequestRefused` for logprobs of other tokens, and for an adapter."""
        if others or adapter:
            raise self._only_own("others" if others else "model")
        failed_before = await self._admitted()
        with self._named.used() as newest:
            logprobs = await self._adapter.score(token_ids, newest)
        await self._load_ended.wait()
        self._assert_whole(failed_before)
        return ScoreResponse(list(_rounded(logprobs)))

    async def load_adapter(self, name: str, version: int, path: Path) -> dict[str, int]:
        """Raises `RequestRefused`: named adapters are served by Shoal's own engine."""
        raise self._only_own("lora_name")

    async def unload_adapter(self, name: str) -> dict[str, int]:
        """Raises `RequestRefused`, as `load_adapter` does."""
        raise self._only_own("lora_name")

    def _only_own(self, field: str) -> RequestRefused:
        return RequestRefused(f"{field}: expected none, {self.abilities.server} is not Shoal's own engine")

    async def update_weights(self, version: int, path: Path) -> None:
        """Serves the weights at `path` as `version`. Raises `RequestRefused` when the canary fails."""
        async with self._loading:
            if version < self._version:
                raise RequestRefused(f"version: expected {self._version} or a newer one, got {version}")
            if not await asyncio.to_thread(path.exists):
                raise RequestRefused(f"weights {path} do not exist")
            self._interruptions += self._running > 0
            if path.name == ADAPTER_FILE:
                await self._load_adapter(version, path)
            else:
                await self._load(version, path)
                self._named.newest = None

    async def _load_adapter(self, version: int, path: Path) -> None:
        """Loads an adapter by name; new requests use it once its canary has passed.

        Before the first one nothing runs: where rows with an adapter and without one share a batch, vLLM 0.32 on a CPU
        computes both kinds by the adapter.
        """
        if self._named.newest is None:
            self._may_send.clear()
        try:
            if self._named.newest is None:
                if self._on_update == "recompute":
                    await self._adapter.abort()
                await self._idle.wait()
            name = await self._named.load(_directory(path), version)
            await self._ask_canary(version, path, name)
            self._named.newest, self._version = name, version
            if self._on_update == "recompute":
                await self._adapter.abort()
        finally:
            self._may_send.set()
            await self._named.unload_unused()

    async def _load(self, version: int, path: Path) -> None:
        if self.how in (StopMode.DRAIN, StopMode.ABORT):
            self._may_send.clear()
        self._loading_version = version
        self._load_ended.clear()
        try:
            await self._put(version, path)
            await self._ask_canary(version, path)
        except BaseException as error:  # an abandoned load leaves the weights as unknown as a failed one
            self._failed_loads += 1
            self._no_whole_weights = f"{self.abilities.server} has no whole weights: {str(error) or repr(error)}"
            self._version = UNKNOWN
            raise
        else:
            self._no_whole_weights = ""
        finally:
            self._loading_version = None
            self._load_ended.set()
            self._may_send.set()

    async def _put(self, version: int, path: Path) -> None:
        """Stops the server, loads the weights and resumes it."""
        if self.how is StopMode.DRAIN:
            await self._idle.wait()
        await self._adapter.stop(self.how)
        try:
            await self._adapter.load(_directory(path), version, self.how)
        finally:  # also after an error: a stopped server would never answer again
            await self._adapter.resume()
        self._version = version

    async def _ask_canary(self, version: int, path: Path, adapter: str | None = None) -> None:
        known = canary.canary_of(path)
        if known is not None:
            off_nats = known.off_nats(await self._adapter.score(known.token_ids, adapter))
            if off_nats:
                raise RequestRefused(
                    f"{self.abilities.server} took version {version} but computes with other weights: {off_nats}; a "
                    f"model with tied embeddings must be untied for vLLM on a CPU (docs/guides/gpus.md)"
                )

    async def info(self) -> EngineInfo:
        """State of the engine; the busy share is the fraction of time with requests of this client."""
        served = self._version
        if self._named.newest is not None:
            if await self._named.lost() and not self._loading.locked():
                self._version = UNKNOWN
        elif self.abilities.reports_version and not self._loading.locked():
            reported = await self._adapter.version()
            if reported != served and served == self._version and not self._loading.locked():
                self._version = UNKNOWN
        own = {"running": self._running, "waiting": 0, "tokens_drawn": self._tokens_drawn, "tokens_prefilled": 0}
        counted = own | await self._adapter.counters()
        self._count(0)
        now_s = time.monotonic()
        busy_share = min(1.0, self._busy_s / max(now_s - self._info_s, 1e-9))
        self._busy_s, self._info_s = 0.0, now_s
        return EngineInfo(
            version=self._version,
            checksum="",
            max_model_len=self.abilities.max_model_len,
            busy_share=busy_share,
            tokens_drawn=counted["tokens_drawn"],
            tokens_prefilled=counted["tokens_prefilled"],
            interruptions=self._interruptions,
            running=counted["running"],
            waiting=counted["waiting"],
            foreign=True,
        )

    async def alive(self) -> None:
        """Returns when the server answers; while it is stopped for new weights, only its HTTP part can."""
        await (self._adapter.alive() if self._loading_version is None else self._adapter.adapters())

    async def abort(self) -> None:
        """Ends all requests and returns their sampled tokens."""
        await self._adapter.abort()

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._adapter.aclose()

    def _count(self, change: int) -> None:
        now_s = time.monotonic()
        if self._running:
            self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s
        self._running += change
        if self._running:
            self._idle.clear()
        else:
            self._idle.set()


def _way(on_update: str, keeps_requests: bool) -> StopMode:
    """Stop mode for the setting and the server's abilities."""
    if on_update == "drain":
        return StopMode.DRAIN
    if not keeps_requests:
        return StopMode.ABORT
    return StopMode.KEEP if on_update == "keep" else StopMode.KEEP_AND_RECOMPUTE


def _stopped(sampled: Completion, stops: Sequence[int]) -> Completion:
    """The completion with the reason `STOP` where it ends in its first stop token.

    SGLang looks at aborts and at the number of tokens first, so such a completion may have their reason.
    """
    at = next((index for index, token in enumerate(sampled.token_ids, 1) if token in stops), None)
    return replace(sampled, finish_reason=FinishReason.STOP) if at == len(sampled.token_ids) else sampled


def _directory(path: Path) -> Path:
    return path.absolute().parent if path.suffix == ".safetensors" else path.absolute()


def _rounded(logprobs: Sequence[float]) -> tuple[float, ...]:
    """Logprobs without the 1e-8 above 0 that rounding may give."""
    return tuple(min(logprob, 0.0) if logprob < SAME_NATS else logprob for logprob in logprobs)


def _check_label(label: int | str) -> None:
    if numbered(str(label)) is None:
        raise EngineUnavailable(f"the server calls its weights {label!r}; somebody else gives it weights as well")
