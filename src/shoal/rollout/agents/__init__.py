"""Rollouts of many turns: agents speak with the model through sessions, and training gets what was drawn in them."""

from shoal.rollout.agents.host import Host, Seat
from shoal.rollout.agents.runner import AgentFailed, AgentRunner, Play

__all__ = ["AgentFailed", "AgentRunner", "Host", "Play", "Seat"]
