"""A server for OpenAI and Anthropic clients on sessions: agents speak text, training gets the drawn tokens."""

from shoal.gateway.registry import Bounds, Sessions
from shoal.gateway.server import Gateway
from shoal.gateway.sessions import Limits, Session

__all__ = ["Bounds", "Gateway", "Limits", "Session", "Sessions"]
