"""Which sessions are open: how many at most, for how long without a request, and with how many tokens."""

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
    """Of all open sessions together. A token held takes 40 to 80 bytes."""

    sessions: int = 20_000
    idle_s: float = 3600.0
    """A session without requests for so long is evicted."""
    tokens: int = 1 << 25
    """Beyond these the sessions that have been idle longest are evicted."""


class Sessions:
    """The open sessions, by the token that their URLs carry, and why the last closed ones are closed.

    What an evicted session drew goes with it: a run ends its own sessions long before, and takes what they drew.
    """

    def __init__(self, desk: SessionContext, bounds: SessionBounds | None = None) -> None:
        self.desk = desk
        self.bounds = bounds or SessionBounds()
        self.closed: dict[str, str] = {}
        """Reasons by token, oldest first; who comes back later is unknown."""
        self._open: dict[str, Session] = {}  # the longest unused first
        self._is_full = False  # of tokens, all of them in sessions that are busy

    def __len__(self) -> int:
        return len(self._open)

    @property
    def tokens_held(self) -> int:
        """By all open sessions."""
        return sum(session.tokens_held for session in self._open.values())

    def open(
        self,
        *,
        sampling: Sampling | None = None,
        limits: SessionLimits | None = None,
        policy: HistoryPolicy = HistoryPolicy.PRESERVE,
        priority: int = 0,
    ) -> Session:
        """A new session; `priority` is that of its requests. Raises `EngineUnavailable` when there are too many."""
        if len(self._open) >= self.bounds.sessions:
            raise EngineUnavailable(f"sessions: expected at most {self.bounds.sessions} open ones; end some")
        if self._is_full:
            raise EngineUnavailable(f"sessions: expected at most {self.bounds.tokens} tokens held; end some")
        session = self.passing(sampling=sampling, limits=limits, policy=policy, priority=priority)
        self._open[session.token] = session
        self.desk.counts.counted["sessions"] += 1
        return session

    def passing(
        self,
        *,
        sampling: Sampling | None = None,
        limits: SessionLimits | None = None,
        policy: HistoryPolicy = HistoryPolicy.PRESERVE,
        priority: int = 0,
    ) -> Session:
        """A session that nobody can come back to."""
        token, limits = secrets.token_urlsafe(18), limits or SessionLimits()
        return Session(token, self.desk, sampling=sampling, limits=limits, policy=policy, priority=priority)

    def get(self, token: str) -> Session | None:
        """The open session of a token, which is used by this."""
        session = self._open.pop(token, None)
        if session is not None:
            self._open[token] = session
            session.used_s = self.desk.clock()
        return session

    async def end(self, session: Session) -> None:
        """Closes a session whose owner has its ledger."""
        await session.end()
        self._open.pop(session.token, None)

    async def end_and_export(self, session: Session) -> Export:
        """Closes a session; what it drew."""
        await session.end(ENDED)
        exported = export(session)
        self._forget(session)
        return exported

    async def evict(self) -> None:
        """Closes sessions that nobody has used for long, and the longest unused while too many tokens are held."""
        now_s, held = self.desk.clock(), self.tokens_held
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
            self.desk.counts.counted["evictions"] += 1
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
