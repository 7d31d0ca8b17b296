"""Software tasks with an agent of your choice; in a run's configuration: `service = "python"`, `path = "swe.py:swe"`.

`params = { tasks = "tasks.jsonl", agent = "bare_loop" }`, where the agent is a module of this folder with `work`.
"""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from shoal.environments.workspace import WorkspaceGame
from shoal.interfaces import Model
from shoal.tasks.sdk import environment
from shoal.types import Message
from shoal.workspace.changes import Worklog
from shoal.workspace.fork import LIMITS, Workspace
from shoal.workspace.tools import Tools

sys.path.append(str(Path(__file__).parent))


class Swe(WorkspaceGame, frozen=True):
    """A file of tasks; the reward is the share of hidden tests that turned green."""

    agent: str = "bare_loop"
    """Module with `work(problem, tools, client, turns)`: bare_loop, agents_sdk or mini_swe."""

    async def play(self, workspace: Workspace, messages: list[Message], model: Model) -> Worklog:
        """Gives the agent the workspace's tools, and the session of this rollout as its model."""
        limits, worklog = replace(LIMITS, wall_s=self.command_s, cpu_s=self.command_s), Worklog(workspace)
        tools = Tools(workspace, limits, self.most_characters, worklog)
        await import_module(self.agent).work(messages[-1].content, tools, model.openai(), self.turns)
        return worklog


swe = environment("swe", max_running=4, timeout_s=900.0)(Swe)
