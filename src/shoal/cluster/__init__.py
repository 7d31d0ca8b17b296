"""A run beyond one machine: the registry of its roles, and the commands that join it."""
