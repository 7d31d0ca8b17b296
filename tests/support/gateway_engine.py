"""An engine that says what it is told to, and keeps what it received; and a gateway before it, served for real."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chat_templates import renderer
from shoal.engine.pool.engine_pool import EnginePool
from shoal.errors import EngineUnavailable
from shoal.gateway.server import Gateway
from shoal.interfaces import Engine, EngineInfo, LogitRules, ServedToken, ServedTokens
from shoal.model.chat_template import ChatRenderer
from shoal.net.server import serving
from shoal.types import Completion, FinishReason, Sampling

CONTEXT = 4096


async def streamed(
    engine: Engine, prompt_ids: Sequence[int], sampling: Sampling, every: int, token_s: float = 0.0
) -> AsyncGenerator[ServedTokens, None]:
    """The completion of an engine, `every` tokens at a time."""
    (whole,) = await engine.generate(prompt_ids, sampling)
    tokens = [ServedToken(*row) for row in zip(whole.token_ids, whole.logprobs, strict=True)]
    step = every or max(len(tokens), 1)
    for start in range(0, max(len(tokens), 1), step):
        await asyncio.sleep(token_s)
        reason = whole.finish_reason if start + step >= len(tokens) else None
        yield ServedTokens(tuple(tokens[start : start + step]), reason)


@dataclass
class ScriptedEngine:
    """Implements `interfaces.Engine`. Says the next of `script`; None is a failure, a text ending in "…" is cut off."""

    renderer: ChatRenderer
    script: list[str | None] = field(default_factory=list)
    received: list[tuple[tuple[int, ...], Sampling]] = field(default_factory=list)
    drawn: list[Completion] = field(default_factory=list)
    delay_s: float = 0.0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Answers wait for it; it is set unless a test clears it."""
    version: int = 0
    aborts: int = 0
    token_s: float = 0.0
    """Seconds between two tokens of a stream."""
    streamed: int = 0
    """Tokens that streams have given."""
    seen_rules: list[LogitRules] = field(default_factory=list)
    _rest: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """Tokens of answers that `max_tokens` cut, by the prompts with which they go on."""

    def __post_init__(self) -> None:
        self.gate.set()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        n: int = 1,
        priority: int = 0,
        session: str = "",
        adapter: str | None = None,
    ) -> list[Completion]:
        self.received.append((tuple(prompt_ids), sampling))
        rest = self._rest.pop(tuple(prompt_ids), None)
        said = "" if rest is not None else self.script.pop(0) if self.script else "ok"
        await asyncio.sleep(self.delay_s)
        await self.gate.wait()
        if said is None:
            raise EngineUnavailable("the engine is gone")
        # One token per byte: never how the tokenizer would have spelt the text.
        ids = rest or [token for char in said.removesuffix("…") for token in self.spelt(char)]
        finish = FinishReason.LENGTH if said.endswith("…") else FinishReason.STOP
        if self.aborts:
            self.aborts, finish = self.aborts - 1, FinishReason.ABORT
        elif finish is FinishReason.STOP and rest is None:
            ids.append(self.renderer.stop_token_ids[0])
        if len(ids) > sampling.max_tokens:
            self._rest[(*prompt_ids, *ids[: sampling.max_tokens])] = ids[sampling.max_tokens :]
            ids, finish = ids[: sampling.max_tokens], FinishReason.LENGTH
        completion = Completion(tuple(ids), (-0.25,) * len(ids), (self.version,) * len(ids), finish)
        self.drawn.append(completion)
        self.version += 1
        return [completion]

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, rules: LogitRules, *, every: int
    ) -> AsyncGenerator[ServedTokens, None]:
        self.seen_rules.append(rules)
        async for tokens in streamed(self, prompt_ids, sampling, every, self.token_s):
            self.streamed += len(tokens.tokens)
            yield tokens

    async def prompt_logprobs(self, token_ids: Sequence[int], top: int) -> list[ServedToken]:
        return [ServedToken(token, -1.0, ((token, -1.0),) * min(top, 1)) for token in token_ids[1:]]

    def spelt(self, char: str) -> list[int]:
        return self.renderer.token_ids(char)

    async def update_weights(self, version: int, path: Path) -> None:
        self.version = version

    async def alive(self) -> None: ...

    async def abort(self) -> None: ...

    async def aclose(self) -> None: ...

    async def info(self) -> EngineInfo:
        return EngineInfo(self.version, "", CONTEXT, 0.0, 0, 0, 0, 0, 0)


@dataclass
class Served:
    """A gateway that listens."""

    engine: ScriptedEngine
    gateway: Gateway
    url: str


@contextlib.asynccontextmanager
async def served(
    *script: str | None, style: str = "qwen3", delay_s: float = 0.0, pooled: bool = False, **options: Any
) -> AsyncIterator[Served]:
    """A gateway on a free port, before a scripted engine, `pooled` as in a run; `options` are the gateway's.

    `is_open` has it answer the model `m` without a session; `token_s` is the time between two tokens of a stream.
    `made` is another renderer.
    """
    made = options.pop("made", None) or renderer(style)
    token_s = options.pop("token_s", 0.0)
    engine = ScriptedEngine(made, list(script), delay_s=delay_s, token_s=token_s)
    if options.pop("is_open", False):
        options = {"model": "m", "model_server": engine, **options}
    pool = EnginePool()
    await pool.join("engine", engine)
    gateway = Gateway(
        pool if pooled else engine, made, **{"max_model_len": CONTEXT, "max_body_bytes": 1 << 20, **options}
    )
    async with serving(gateway.app, grace_s=1) as url:
        yield Served(engine, gateway, url)
