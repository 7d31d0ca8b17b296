"""Rollouts of many turns: agents speak with the model through sessions, and training gets the sampled tokens."""
