"""A server for OpenAI and Anthropic clients on sessions: agents speak text, training gets the drawn tokens."""

from shoal.gateway.server import Gateway
from shoal.gateway.sessions import Limits, Session, Sessions

__all__ = ["Gateway", "Limits", "Session", "Sessions"]
