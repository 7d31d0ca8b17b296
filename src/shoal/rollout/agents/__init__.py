"""Rollouts of many turns: agents speak with the model through sessions, and training gets what was drawn in them."""

from shoal.rollout.agents.host import AgentSession, Host
from shoal.rollout.agents.runner import AgentFailed, AgentRunner, Play

__all__ = ["AgentFailed", "AgentRunner", "AgentSession", "Host", "Play"]
