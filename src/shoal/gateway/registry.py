"""Registry of open sessions, bounded in their number, idle time and tokens."""

import secrets
from dataclasses import dataclass

from shoal.errors import EngineUnavailable
from shoal.gateway.session_routes import Export, export
from shoal.gateway.sessions import ENDED, Session, SessionContext, SessionLimits
from shoal.gateway.token_tree import HistoryPolicy
from shoal.types import Sampling

CLOSED_KEPT = 4096


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
        """Opens a session; `priority` is the priority of its requests.

        Raises `EngineUnavailable` when too many are open.
        """
        if len(self._open) >= self.bounds.sessions:
            raise EngineUnavailable(f"sessions: expected at most {self.bounds.sessions} open ones; end some")
        if self._is_full:
            raise EngineUnavailable(f"sessions: expected at most {self.bounds.tokens} tokens held; end some")
        session = self.passing(sampling=sampling, limits=limits, policy=policy, priority=priority)
        self._open[session.token] = session
        self.context.counts.counted["sessions"] += 1
        return session

    def passing(
        self,
        *,
        sampling: Sampling | None = None,
        limits: SessionLimits | None = None,
        policy: HistoryPolicy = HistoryPolicy.PRESERVE,
        priority: int = 0,
    ) -> Session:
        """Session outside the registry, for a single request."""
        token, limits = secrets.token_urlsafe(18), limits or SessionLimits()
        return Session(token, self.context, sampling=sampling, limits=limits, policy=policy, priority=priority)

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
        await session.end(ENDED)
        exported = export(session)
        self._forget(session)
        return exported

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
            self.context.counts.counted["evictions"] += 1
        self._is_full = held > self.bounds.tokens

    async def _close(self, session: Session, reason: str) -> None:
        await session.end(reason)
        self._forget(session)

    def _forget(self, session: Session) -> None:
        if self._open.pop(session.token, None) is None:  # another request has closed it meanwhile
            return
        self.closed[session.token] = session.ended
        while len(self.closed) > CLOSED_KEPT:
            del self.closed[next(iter(self.closed))]
