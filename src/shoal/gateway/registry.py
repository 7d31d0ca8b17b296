"""Registry of trained sessions, bounded in their number, idle time and tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shoal.errors import EngineUnavailable
from shoal.gateway.answer_request import SessionContext
from shoal.gateway.samplers import TrainedSampler
from shoal.gateway.sessions import DEFAULTS, ENDED, OpenRequest, Session
from shoal.gateway.token_tree import TokenTree
from shoal.interfaces import Engine, FinishedTurns
from shoal.types import Message

if TYPE_CHECKING:
    from shoal.gateway.promotion import Trial

CLOSED_KEPT = 4096


class SampledTurn(msgspec.Struct):
    """One generation as it was sampled."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str
    ill_formed: bool
    parent: int | None = None
    """Index of the turn whose tokens are a prefix of `prompt_ids`; None for a new root."""


class Export(msgspec.Struct):
    """Answer of `POST /s/<token>/end`: the session's turns, in the order in which they began."""

    messages: tuple[Message, ...]
    turns: list[SampledTurn]
    truncated: bool


@dataclass(frozen=True, slots=True)
class SessionBounds:
    """Bounds over all open sessions together. A held token takes 40 to 80 bytes."""

    sessions: int = 20_000
    idle_s: float = 3600.0
    """Seconds without a request after which a session is evicted."""
    tokens: int = 1 << 25
    """Tokens that open sessions may hold; beyond it the longest idle sessions are evicted."""


class Sessions:
    """Open sessions by the token in their URLs, and the reasons why the last ones were closed.

    Eviction discards a session's sampled tokens. A run exports them and ends its sessions long before.
    """

    def __init__(
        self, context: SessionContext, engine: Engine, bounds: SessionBounds, trial: "Trial | None" = None
    ) -> None:
        self.context = context
        self._engine, self._trial = engine, trial
        self.bounds = bounds
        self.closed: dict[str, str] = {}
        """Reasons by token, oldest first; older tokens are unknown."""
        self._open: dict[str, Session] = {}  # the longest unused first
        self._is_full = False  # tokens: all held by busy sessions

    def __len__(self) -> int:
        return len(self._open)

    def open(self, asked: OpenRequest = DEFAULTS, priority: int = 0, turns: FinishedTurns | None = None) -> Session:
        """Opens a trained session. Raises `EngineUnavailable` when too many are open."""
        if len(self._open) >= self.bounds.sessions:
            raise EngineUnavailable(f"sessions: expected at most {self.bounds.sessions} open ones; end some")
        if self._is_full:
            raise EngineUnavailable(f"sessions: expected at most {self.bounds.tokens} tokens held; end some")
        sampler = TrainedSampler(self.context, self._engine, priority, turns)
        session = Session(self.context, asked, self._trial.sampler(sampler) if self._trial else sampler)
        self._open[session.token] = session
        self.context.counted["sessions"] += 1
        return session

    def get(self, token: str) -> Session | None:
        """Open session of a token; the call counts as use."""
        session = self._open.pop(token, None)
        if session is not None:
            self._open[token] = session
            session.used_s = self.context.clock()
        return session

    async def end(self, session: Session, reason: str = ENDED) -> None:
        """Closes a session; later requests to it get the reason."""
        await session.end(reason)
        if self._open.pop(session.token, None) is None:  # another request has closed it meanwhile
            return
        self.closed[session.token] = session.ended
        while len(self.closed) > CLOSED_KEPT:
            del self.closed[next(iter(self.closed))]

    async def evict(self) -> None:
        """Closes sessions idle for too long, and the longest unused while too many tokens are held."""
        now_s, held = self.context.clock(), sum(session.tokens_held for session in self._open.values())
        for session in list(self._open.values()):
            idle_s = now_s - session.used_s
            is_wanted = held <= self.bounds.tokens and idle_s <= self.bounds.idle_s
            if is_wanted or session.is_busy or session.token not in self._open:
                continue
            why = f"after {idle_s:.0f} s without a request"
            if idle_s <= self.bounds.idle_s:
                why += f", when open sessions held more than {self.bounds.tokens} tokens"
            held -= session.tokens_held
            await self.end(session, f"session: it was closed {why}")
            self.context.counted["evictions"] += 1
        self._is_full = held > self.bounds.tokens


def export(tree: TokenTree) -> Export:
    """Export of a session's generations."""
    sampled = sorted(tree.exported(), key=lambda generation: generation.id)
    turns = []
    for one, turn in zip(sampled, tree.turns(), strict=True):
        answer, prompt = one.completion, tree.prompt_ids(one)
        streams = (answer.token_ids, answer.logprobs, answer.versions)
        turns.append(SampledTurn(prompt, *streams, answer.finish_reason, one.ill_formed, turn.parent))
    return Export(tree.messages(), turns, tree.truncated)
