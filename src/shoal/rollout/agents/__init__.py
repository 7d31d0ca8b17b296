"""Rollouts of many turns: agents speak with the model through sessions, and training gets the sampled tokens."""

from shoal.rollout.agents.host import AgentSession, Host
from shoal.rollout.agents.runner import AgentFailed, AgentRunner, Play

__all__ = ["AgentFailed", "AgentRunner", "AgentSession", "Host", "Play"]
