"""Local engine: continuous batching over any transformers causal LM, one step at a time, in one thread.

    submit -> waiting -> running (prefill, decode, decode, ...) -> finished
                            ^          |
                            +----------+  new weights: KV dropped, prompt + sampled tokens prefilled again

Requests, weight updates and pauses take effect between two steps. Every token carries the Version of the weights that
computed its logits.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.engine.compute.adapters import NamedAdapter
from shoal.engine.compute.batch import StepBatch, sample
from shoal.engine.compute.forward import forward_of
from shoal.engine.compute.kv_cache import KVCache, Stored
from shoal.engine.compute.options import EngineLimits, OnUpdate, PauseMode
from shoal.engine.compute.prefixes import PrefixCache
from shoal.engine.compute.request import Draft, Request, drafts_of
from shoal.engine.compute.scheduler import Scheduler
from shoal.engine.compute.weight_loading import StagedWeights, WeightSlots
from shoal.errors import EngineUnavailable, RequestRefused
from shoal.interfaces import EngineInfo
from shoal.model.mixers import mixers_of
from shoal.model.routing import Routing, routers_of
from shoal.types import FinishReason

COUNTERS = (
    "tokens_drawn",
    "tokens_prefilled",
    "interruptions",
    "preemptions",
    "stale_sequences",
    "stale_tokens",
    "prefix_tokens_reused",
    "busy_s",
    "load_s",
)
"""Attributes of the engine that count since its start."""
GAUGES = ("version", "prefix_cache_bytes", "running", "waiting")
SHORTEST_PREFIX = 16  # fewer tokens are computed faster than they are found


class StepEngine:
    """Engine that samples completions. Not thread-safe: only the stepping thread may call it."""

    def __init__(
        self,
        model: PreTrainedModel,
        limits: EngineLimits,
        *,
        on_update: OnUpdate = OnUpdate.RECOMPUTE,
        version: int = 0,
        checksum: str = "",
        seed: int = 0,
        records_routing: bool = False,
    ) -> None:
        """`seed` decides the sampling of requests without a seed; `records_routing` is for a mixture of experts."""
        self.limits = limits
        self.version, self.checksum = version, checksum
        self.tokens_drawn = self.tokens_prefilled = self.interruptions = self.stale_sequences = self.preemptions = 0
        self.prefix_tokens_reused = self.stale_tokens = 0
        self.model = model.requires_grad_(False)
        self._forward = forward_of(self.model, limits.max_model_len)
        self._routing = Routing(model) if records_routing and routers_of(model) else None
        self.slots = WeightSlots(model, self._forward.products)
        self.adapters: dict[str, NamedAdapter] = {}
        self._device = next(model.parameters()).device
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        self._on_update = on_update
        room_tokens = limits.max_running * limits.max_model_len
        self._cache = KVCache(limits.max_model_len, limits.kv_tokens or 2 * room_tokens)
        self._scheduler = Scheduler[Draft](
            max_running=limits.max_running,
            kv_budget_tokens=limits.kv_tokens or room_tokens,
            chunk_tokens=limits.chunk_tokens,
            max_model_len=limits.max_model_len,
            capacity=self._cache.capacity,
            reuse=self._reusable,
            copies=not mixers_of(model),
        )
        self._prefixes: PrefixCache[Stored] = PrefixCache(limits.prefix_cache_bytes)
        self._found: dict[Draft, tuple[int, Stored]] = {}  # prefixes that the plan in the making reuses
        self._requests: dict[int, Request] = {}
        self._ids = count()
        self._finished: list[Request] = []
        self._pause: PauseMode | None = None
        self._emptied: list[Future[None]] = []
        self._update: StagedWeights | None = None
        self._update_waiters: list[Future[int]] = []
        self._batch: StepBatch | None = None
        self._token_B: Tensor | None = None
        self._generator = np.random.Generator(np.random.Philox(key=seed))
        self.busy_s = self.load_s = 0.0
        self._busy_before_s, self._asked_s = 0.0, time.perf_counter()

    def check(self, request: Request) -> None:
        """Raises `RequestRefused` for a request that can never be answered. Safe in any thread."""
        if not 1 <= request.n <= self.limits.max_waiting:
            raise RequestRefused(f"n: expected 1 to {self.limits.max_waiting}, got {request.n}")
        self.check_tokens(request.prompt_ids, self.limits.max_model_len - 1)

    def check_tokens(self, token_ids: Sequence[int], longest: int) -> None:
        """Raises `RequestRefused` for tokens that the model cannot read. Safe in any thread: reads only constants."""
        if not 0 < len(token_ids) <= longest:
            raise RequestRefused(f"token_ids: expected 1 to {longest} tokens, got {len(token_ids)}")
        if not 0 <= min(token_ids) <= max(token_ids) < self.vocabulary:
            raise RequestRefused(f"token_ids: expected ids from 0 to {self.vocabulary - 1}")

    def submit(self, request: Request) -> None:
        """Queues a request that `check` accepts. Raises `EngineUnavailable` when paused or full."""
        if self._pause in (PauseMode.ABORT, PauseMode.WAIT):
            raise EngineUnavailable("the engine is paused")
        if self._scheduler.waiting + request.n > self.limits.max_waiting:
            raise EngineUnavailable(f"the queue is full: {self._scheduler.waiting} sequences wait")
        request_id = next(self._ids)
        request.drafts += drafts_of(request, request_id, self.limits.max_model_len, self.adapters)
        self._requests[request_id] = request  # after all checks that raise: a request without drafts would never end
        for draft in request.drafts:
            self._scheduler.add(draft)

    def abort(self, requests: Sequence[Request] | None = None) -> int:
        """Ends requests (all when None) with their sampled tokens; returns how many were unfinished."""
        submitted = list(self._requests.values()) if requests is None else [r for r in requests if r.drafts]
        chosen = [request for request in submitted if request.drafts[0].request_id in self._requests]
        for request in chosen:
            for draft in request.drafts:
                if draft.finish_reason is None:
                    self._finish(draft, FinishReason.ABORT)
        return len(chosen)

    @property
    def paused(self) -> bool:
        """Whether `pause` was called and `resume` was not."""
        return self._pause is not None

    def pause(self, mode: PauseMode) -> "Future[None]":
        """Pauses; the future completes once the mode's promise is kept."""
        self._pause = mode
        future: Future[None] = Future()
        if mode is PauseMode.ABORT:
            self.abort()
        if mode is PauseMode.WAIT and self._requests:
            self._emptied.append(future)
        else:
            future.set_result(None)
        return future

    def resume(self) -> None:
        """Ends a pause."""
        self._pause = None
        self._settle_emptied()

    def update(self, weights: StagedWeights) -> "Future[int]":
        """Serves staged weights from the next step on.

        The future's result is the version served then: this one or a newer.

        If several updates wait, only the newest is loaded, in any order of arrival.
        """
        future: Future[int] = Future()
        newest = self._update.version if self._update is not None else self.version
        if weights.version < newest and self._update is None:
            future.set_result(newest)
            return future
        if weights.version >= newest:
            self._update = weights
        self._update_waiters.append(future)
        return future

    def check_update(self, version: int) -> None:
        """Raises `RequestRefused` for a version that cannot be served any more."""
        if version < self.version:
            raise RequestRefused(f"version: {self.version} is served, expected no older one, got {version}")

    def load_adapter(self, adapter: NamedAdapter) -> None:
        """Serves a named adapter from the next step on; running answers under its name continue with it."""
        older = self.adapters.get(adapter.name)
        if older is not None and older.version > adapter.version:
            raise RequestRefused(f"version: {older.version} of {adapter.name!r} is served, got {adapter.version}")
        if older is None and len(self.adapters) >= self.limits.max_adapters:
            raise RequestRefused(f"lora_name: {len(self.adapters)} adapters are loaded already; unload another first")
        self.adapters[adapter.name] = adapter
        for request in self._requests.values():
            if request.adapter == adapter.name:
                for draft in request.drafts:
                    draft.adapter = adapter
        running = [draft for draft in self._scheduler.running if draft.adapter is adapter]
        self.interruptions += bool(running)
        self._outdate(running)

    def unload_adapter(self, name: str) -> None:
        """Forgets a named adapter; requests that name it end with their sampled tokens."""
        if self.adapters.pop(name, None) is None:
            raise RequestRefused(f"lora_name: no adapter {name!r} is loaded")
        self.abort([request for request in self._requests.values() if request.adapter == name])

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        loads = self._update is not None and not self._draining
        computes = self._pause is not PauseMode.KEEP and bool(self._requests)
        return not (loads or computes or self._finished)

    @property
    def _draining(self) -> bool:
        """Whether running sequences finish before other weights are loaded."""
        return self._on_update is OnUpdate.DRAIN and bool(self._scheduler.running)

    def step(self) -> list[Request]:
        """Loads waiting weights, computes one forward if there is work, and returns the requests that ended."""
        began_s = time.perf_counter()
        if self._update is not None:
            self._load_or_drain()
            self.load_s += time.perf_counter() - began_s
        if self._pause is not PauseMode.KEEP and self._requests:
            self._compute()
        self.busy_s += time.perf_counter() - began_s
        finished, self._finished = self._finished, []
        return finished

    def info(self) -> EngineInfo:
        """State of the engine; `busy_share` covers the time since the last call."""
        now_s = time.perf_counter()
        share = (self.busy_s - self._busy_before_s) / max(now_s - self._asked_s, 1e-9)
        self._busy_before_s, self._asked_s = self.busy_s, now_s
        return EngineInfo(
            version=self.version,
            checksum=self.checksum,
            max_model_len=self.limits.max_model_len,
            busy_share=min(share, 1.0),
            tokens_drawn=self.tokens_drawn,
            tokens_prefilled=self.tokens_prefilled,
            interruptions=self.interruptions,
            running=self.running,
            waiting=self.waiting,
        )

    @property
    def running(self) -> int:
        """Sequences that run."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Sequences queued."""
        return self._scheduler.waiting

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes of KV kept of ended sequences."""
        return self._prefixes.size_bytes

    @torch.inference_mode()
    def _compute(self) -> None:
        """Computes one forward, and samples one token for every sequence that is ready."""
        batch = self._next_batch()
        logits_KV = batch.logits(self._forward)
        if self._routing is not None:
            batch.route(self._routing.found())
        chunks = batch.plan.chunks
        self.tokens_prefilled += sum(chunk.length for chunk in chunks)
        self._cache.copy_prefixes(
            (c.sequence, follower, follower.prompt_len) for c in chunks for follower in c.followers
        )
        for scored in batch.scored:
            scored.note(logits_KV)
        if batch.sampling is None:
            return
        logits_BV = logits_KV if batch.expand is None else logits_KV.index_select(0, batch.expand)
        self._token_B, logp_B = sample(batch.ruled(logits_BV), batch.sampling, self._uniforms(batch))
        tokens, logprobs = self._token_B.tolist(), logp_B.tolist()
        batch.note_ruled(logits_BV, tokens, logprobs)
        batch.note_kept()
        self._record(batch.drafts, tokens, logprobs)

    def _next_batch(self) -> StepBatch:
        plan = self._scheduler.plan()
        assert not plan.empty, "unfinished requests and nothing to compute"
        if self._batch is not None and self._batch.plan is plan:
            assert self._token_B is not None
            if self._batch.advance(self._token_B):
                return self._batch
        self._batch = None  # its views of storage may have to go now
        for draft in plan.preempted:
            self._cache.release(draft)
            self.preemptions += 1
        self._cache.place_all(plan.sequences)
        for draft, (length, stored) in self._found.items():
            self._cache.restore(stored, draft, length)
            self.prefix_tokens_reused += length
        self._found.clear()
        self._cache.copy_prefixes((copy.source, copy.target, copy.length) for copy in plan.copies)
        for copy in plan.copies:
            copy.target.routing = copy.target.routing or copy.source.routing[: copy.length]
        self._cache.close_holes()
        self._batch = StepBatch(plan, self._cache, self._device)
        return self._batch

    def _uniforms(self, batch: StepBatch) -> Tensor:
        """Random numbers [B] in [0, 1): from the completion's own stream where the request has a seed."""
        assert batch.sampling is not None
        if batch.sampling.all_greedy:
            return torch.zeros(0)
        own = torch.from_numpy(self._generator.random(len(batch.drafts), dtype=np.float32))
        if batch.seeded:
            for row, draft in enumerate(batch.drafts):
                if draft.uniforms is not None:
                    own[row] = draft.uniforms[len(draft.sampled)]
        return own.to(self._device)

    def _record(self, drafts: Sequence[Draft], tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        for draft, token, logprob in zip(drafts, tokens, logprobs, strict=True):
            if not draft.max_sampled:  # it was only scored
                self._finish(draft, FinishReason.LENGTH)
                continue
            self.tokens_drawn += 1
            self.stale_tokens += draft.stale
            version = self.version if draft.adapter is None else draft.adapter.version
            if (reason := draft.reason_after(token, logprob, version)) is not None:
                self._finish(draft, reason)

    def _finish(self, draft: Draft, reason: FinishReason) -> None:
        draft.finish_reason = reason
        self._keep_prefix(draft)
        self._scheduler.remove(draft)
        self._cache.release(draft)
        request = self._requests[draft.request_id]
        if request.finished:
            del self._requests[draft.request_id]
            self._finished.append(request)
            self._settle_emptied()

    def _keep_prefix(self, draft: Draft) -> None:
        """Keeps the KV of an ended sequence for sequences with the same beginning."""
        if draft.stale or draft.kv_len < SHORTEST_PREFIX or not self.limits.prefix_cache_bytes:
            return
        stored = self._cache.exported(draft, draft.kv_len)
        if stored is not None:
            self._prefixes.keep((*draft.marked, *draft.tokens(0, draft.kv_len)), stored, stored.size_bytes)

    def _reusable(self, draft: Draft) -> int:
        """Number of first tokens whose KV an ended sequence left, under the served weights."""
        found = self._prefixes.longest((*draft.marked, *draft.tokens(0, draft.total - 1)))
        length = 0 if found is None else found[1].usable(found[0] - len(draft.marked))
        if found is None or length < SHORTEST_PREFIX:
            return 0
        self._found[draft] = length, found[1]
        return length

    def _outdate(self, running: Sequence[Draft]) -> None:
        """Drops the KV of running sequences whose weights changed, or keeps it and counts them as stale."""
        if self._on_update is OnUpdate.KEEP:
            self._scheduler.mark_stale(running)
            self.stale_sequences += sum(draft.stale for draft in running)
        else:
            for draft in running:
                self._cache.clear(draft)
            self._scheduler.forget(running)

    def _settle_emptied(self) -> None:
        """Completes the futures of pauses when the engine is empty or the pause is over."""
        if self._pause is None or not self._requests:
            for future in self._emptied:
                future.set_result(None)
            self._emptied.clear()

    def _load_or_drain(self) -> None:
        """Loads the staged weights, unless running sequences must finish first."""
        assert self._update is not None
        if self._draining:
            self._scheduler.admitting = False
            return
        running = self._scheduler.running
        self._scheduler.admitting = True
        self.slots.load(self._update)
        self._forward.lay_out()
        self._prefixes.clear()
        self.interruptions += bool(running)
        self._outdate(running)
        self.version, self.checksum = self._update.version, self._update.checksum
        self._update = None
        for future in self._update_waiters:
            future.set_result(self.version)
        self._update_waiters.clear()
