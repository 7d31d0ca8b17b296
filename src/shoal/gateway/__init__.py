"""Server of sessions for OpenAI and Anthropic clients: agents exchange text, and training gets the sampled tokens."""

from shoal.gateway.registry import SessionBounds, Sessions
from shoal.gateway.server import Gateway
from shoal.gateway.sessions import Session, SessionLimits

__all__ = ["Gateway", "Session", "SessionBounds", "SessionLimits", "Sessions"]
