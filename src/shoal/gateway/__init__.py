"""A server for OpenAI and Anthropic clients on sessions: agents speak text, training gets the drawn tokens."""

from shoal.gateway.registry import SessionBounds, Sessions
from shoal.gateway.server import Gateway
from shoal.gateway.sessions import Session, SessionLimits

__all__ = ["Gateway", "Session", "SessionBounds", "SessionLimits", "Sessions"]
