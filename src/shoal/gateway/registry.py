"""Registry of open sessions, bounded in their number, idle time and tokens."""

import secrets
from dataclasses import dataclass

import msgspec

from shoal.errors import EngineUnavailable
from shoal.gateway.sessions import ENDED, Session, SessionContext, SessionLimits
from shoal.gateway.token_tree import HistoryPolicy, TokenTree
from shoal.types import Message, Sampling

CLOSED_KEPT = 4096


class SampledTurn(msgspec.Struct):
    """One generation as it was sampled."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    ill_formed: bool
    parent: int | None = None
    """Index of the turn whose tokens `prompt_ids` begins with; None where it begins anew."""


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
    """Open sessions by the token in their URLs, and the reasons for the last closed ones.

    An evicted session takes its sampled tokens with it. A run ends its own sessions long before, and exports their
    tokens.
    """

    def __init__(self, context: SessionContext, bounds: SessionBounds | None = None) -> None:
        self.context = context
        self.bounds = bounds or SessionBounds()
        self.closed: dict[str, str] = {}
        """Reasons by token, oldest first; older tokens are unknown."""
        self._open: dict[str, Session] = {}  # the longest unused first
        self._is_full = False  # tokens: all held by busy sessions

    def __len__(self) -> int:
        return len(self._open)

    @property
    def tokens_held(self) -> int:
        """Tokens that all open sessions hold."""
        return sum(session.tokens_held for session in self._open.values())

    def open(
        self,
        *,
        sampling: Sampling | None = None,
        limits: SessionLimits | None = None,
        policy: HistoryPolicy = HistoryPolicy.PRESERVE,
        priority: int = 0,
    ) -> Session:
        """Opens a session; see `Session`. Raises `EngineUnavailable` when too many are open."""
        if len(self._open) >= self.bounds.sessions:
            raise EngineUnavailable(f"sessions: expected at most {self.bounds.sessions} open ones; end some")
        if self._is_full:
            raise EngineUnavailable(f"sessions: expected at most {self.bounds.tokens} tokens held; end some")
        session = Session(new_token(), self.context, sampling=sampling, limits=limits, policy=policy, priority=priority)
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

    async def end(self, session: Session) -> None:
        """Closes a session whose owner has its token tree."""
        await session.end()
        self._open.pop(session.token, None)

    async def end_and_export(self, session: Session) -> Export:
        """Closes a session and returns its export."""
        await self._close(session, ENDED)
        return export(session.tree)

    async def evict(self) -> None:
        """Closes sessions idle for too long, and the longest unused while too many tokens are held."""
        now_s, held = self.context.clock(), self.tokens_held
        for session in list(self._open.values()):
            idle_s = now_s - session.used_s
            is_wanted = held <= self.bounds.tokens and idle_s <= self.bounds.idle_s
            if is_wanted or session.is_busy or session.token not in self._open:
                continue
            why = f"after {idle_s:.0f} s without a request"
            if idle_s <= self.bounds.idle_s:
                why += f", when open sessions held more than {self.bounds.tokens} tokens"
            held -= session.tokens_held
            await self._close(session, f"session: it was closed {why}")
            self.context.counted["evictions"] += 1
        self._is_full = held > self.bounds.tokens

    async def _close(self, session: Session, reason: str) -> None:
        await session.end(reason)
        if self._open.pop(session.token, None) is None:  # another request has closed it meanwhile
            return
        self.closed[session.token] = session.ended
        while len(self.closed) > CLOSED_KEPT:
            del self.closed[next(iter(self.closed))]


def new_token() -> str:
    """Token of a new session."""
    return secrets.token_urlsafe(18)


def export(tree: TokenTree) -> Export:
    """Export of a session's generations."""
    sampled = sorted(tree.exported(), key=lambda generation: generation.id)
    turns = []
    for one, turn in zip(sampled, tree.turns(), strict=True):
        drawn, prompt = one.completion, list(tree.prompt_ids(one))
        ids, logprobs, versions = list(drawn.token_ids), list(drawn.logprobs), list(drawn.versions)
        end = drawn.finish_reason
        turns.append(SampledTurn(prompt, ids, logprobs, versions, end, one.ill_formed, turn.parent))
    return Export(tree.messages(), turns, tree.truncated)
