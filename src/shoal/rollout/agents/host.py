"""The gateway inside a run: sessions for agents, over HTTP."""

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import uvicorn

from shoal.gateway.registry import SessionBounds
from shoal.gateway.server import Gateway
from shoal.gateway.sessions import Session, SessionLimits
from shoal.interfaces import Engine, Purpose
from shoal.model.chat_template import ChatRenderer
from shoal.net.listening import listening_socket, url_of
from shoal.net.server import uvicorn_config
from shoal.rollout.single_turn import priority_of, sampled_for
from shoal.types import Sampling, Task, seed_for

STOP_GRACE_S = 1
UNLIMITED = sys.maxsize
"""Generations and tokens of a rollout: its deadline bounds them, and any other bound would fail what goes well."""
IDLE_FACTOR = 4.0
"""A session outlives its rollout's deadline by this: the host ends sessions, eviction is for those it lost."""


@dataclass(frozen=True, slots=True)
class AgentSession:
    """One rollout's place at the model. Whoever has the key or the URL speaks in its session, and in no other."""

    session: Session
    task: Task
    purpose: Purpose
    timeout_s: float
    base_url: str
    """URL for OpenAI's clients."""
    anthropic_base_url: str

    @property
    def api_key(self) -> str:
        """Opens the session at the gateway's common URL too."""
        return self.session.token


class Host:
    """A gateway and how sessions at it are drawn."""

    def __init__(self, gateway: Gateway, sampling: Sampling, url: str) -> None:
        """`sampling` is training's, `url` the gateway's address."""
        self.gateway = gateway
        self._sampling = sampling
        self._url = url

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, engine: Engine, renderer: ChatRenderer, *, max_model_len: int, sampling: Sampling, at: str = "127.0.0.1"
    ) -> "AsyncIterator[Host]":
        """A host on `engine` until the context is left, at a free port of an address. Raises `ConfigError`.

        Nobody gets in without the URL or key of a session, and only the host opens sessions.
        """
        gateway = Gateway(
            engine,
            renderer,
            max_model_len=max_model_len,
            admin_key=secrets.token_urlsafe(24),
            host=at,
            bounds=SessionBounds(idle_s=24 * 3600.0),
        )
        with listening_socket(at, 0) as listening:
            server = _Server(uvicorn_config(gateway.app, grace_s=STOP_GRACE_S))
            serving = asyncio.create_task(server.serve(sockets=[listening]), name="gateway")
            try:
                yield cls(gateway, sampling, url_of(listening))
            finally:
                server.should_exit = True
                await serving

    def seat(self, task: Task, i: int, purpose: Purpose, timeout_s: float) -> AgentSession:
        """A session for rollout `i` of a task. Raises `EngineUnavailable` when there are too many."""
        sampling = sampled_for(purpose, self._sampling)
        session = self.gateway.sessions.open(
            sampling=replace(sampling, seed=seed_for("rollout", self._sampling.seed or 0, task.id, i)),
            limits=SessionLimits(UNLIMITED, UNLIMITED, age_s=IDLE_FACTOR * timeout_s),
            priority=priority_of(purpose),
        )
        root = f"{self._url}/s/{session.token}"
        return AgentSession(session, task, purpose, timeout_s, f"{root}/v1", root)


class _Server(uvicorn.Server):
    """A server that leaves signals to its run."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Does nothing."""
        yield
