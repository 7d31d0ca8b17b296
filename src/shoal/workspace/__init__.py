"""Workspaces: file trees in which the commands of agents run in the sandbox; hidden tests give their verdicts."""
