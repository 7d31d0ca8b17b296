"""The gateway inside a run: sessions for rollouts, in this process and over HTTP."""

import contextlib
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.gateway.answer_request import AnswerRequest, SamplingRequest
from shoal.gateway.conversation import Conversation
from shoal.gateway.server import Gateway
from shoal.gateway.sessions import OpenRequest, Session, SessionBounds, SessionLimits
from shoal.gateway.token_tree import TokenTree
from shoal.interfaces import Engine, FinishedTurns
from shoal.model.chat_template import ChatRenderer
from shoal.net.chat import TIMEOUT_S, close_clients, session_client
from shoal.net.listening import TLSFiles, is_loopback, tls_files
from shoal.net.server import serving
from shoal.types import Message, Sampling

if TYPE_CHECKING:
    from openai import AsyncOpenAI

STOP_GRACE_S = 1
UNLIMITED = sys.maxsize
"""Generations and tokens of a rollout: only its deadline bounds them."""
IDLE_FACTOR = 4.0
"""Age limit of a session, in multiples of its rollout's deadline; it catches sessions that no rollout ended."""


@dataclass(frozen=True, slots=True)
class HostedSession:
    """Implements `interfaces.Model`: a rollout's conversation, with the answers sampled in it.

    The key and the URL give access to this session only."""

    session: Session
    gateway: Gateway
    base_url: str
    """URL for OpenAI's clients."""
    anthropic_base_url: str
    api_key: str
    """Gives access to the session at the gateway's common URL too."""

    @property
    def tree(self) -> TokenTree:
        """Turns and messages of the conversation."""
        return self.session.tree

    async def answer(self, messages: Sequence[Message], *, tools: str = "", max_tokens: int | None = None) -> Message:
        """The model's next message, without HTTP; messages that extend an answer are not tokenised again."""
        asked = AnswerRequest(Conversation(tuple(messages), tools), SamplingRequest(max_tokens=max_tokens))
        generation = await self.session.generation(asked)
        self.tree.deliver(generation.id)
        return generation.message

    def openai(self) -> "AsyncOpenAI":
        """OpenAI's client of this session; see `net.openai_client`."""
        return session_client(self.base_url, self.api_key, TIMEOUT_S)

    async def end(self) -> None:
        """Refuses further requests, and waits for answers under way."""
        await self.gateway.sessions.end(self.session)


@dataclass(frozen=True, slots=True)
class Host:
    """A gateway and the URL at which it listens."""

    gateway: Gateway
    url: str

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, engine: Engine, renderer: ChatRenderer, *, max_model_len: int, at: str = "127.0.0.1"
    ) -> "AsyncIterator[Host]":
        """Context manager: listens at a free port of the address `at`. Raises `ConfigError`.

        Requests need the URL or key of a session, and only the host opens sessions.
        """
        bounds = SessionBounds(idle_s=24 * 3600.0)
        key = secrets.token_urlsafe(24)
        gateway = Gateway(engine, renderer, max_model_len=max_model_len, admin_key=key, host=at, bounds=bounds)
        tls: TLSFiles = {} if is_loopback(at) else tls_files()
        async with serving(gateway.app, at, tls=tls, grace_s=STOP_GRACE_S) as url:
            try:
                yield cls(gateway, url)
            finally:
                await close_clients()

    def session(
        self, sampling: Sampling, priority: int, timeout_s: float, turns: FinishedTurns | None = None
    ) -> HostedSession:
        """A session for a rollout of at most `timeout_s`. Raises `EngineUnavailable` when there are too many."""
        limits = SessionLimits(UNLIMITED, UNLIMITED, age_s=IDLE_FACTOR * timeout_s)
        session = self.gateway.sessions.open(OpenRequest(sampling, limits), priority, turns)
        root = f"{self.url}/s/{session.token}"
        return HostedSession(session, self.gateway, f"{root}/v1", root, session.token)
