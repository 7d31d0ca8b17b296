"""Rollouts of many turns: agents speak with the model through sessions, and training gets what was drawn in them."""

from shoal.agents.host import Host, Seat
from shoal.agents.runner import AgentFailed, AgentRunner, Play

__all__ = ["AgentFailed", "AgentRunner", "Host", "Play", "Seat"]
