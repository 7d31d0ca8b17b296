"""mini-swe-agent, unchanged, on a workspace: only its environment is another. `pip install mini-swe-agent`."""

import asyncio
from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from openai import AsyncOpenAI

from shoal.workspace.tools import Tools


class WorkspaceEnvironment(LocalEnvironment):
    """Runs the agent's commands in a workspace; submissions are found as by mini-swe-agent itself."""

    def __init__(self, tools: Tools, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.tools, self.loop = tools, loop

    def execute(self, action: Any, cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """The output of one command, and its exit code."""
        command = action["command"] if isinstance(action, dict) else action
        running = self.tools.workspace.run(command, self.tools.limits)
        finished = asyncio.run_coroutine_threadsafe(running, self.loop).result()
        code = finished.exit_code if finished.exit_code is not None else -1
        output = {"output": finished.stdout.decode(errors="replace"), "returncode": code, "exception_info": ""}
        self._check_finished(output)
        return output


async def work(problem: str, tools: Tools, client: AsyncOpenAI, turns: int) -> None:
    """Lets the model work in a workspace for some turns."""
    server = {"api_base": str(client.base_url), "api_key": client.api_key}
    agent = DefaultAgent(
        LitellmModel(model_name="openai/policy", cost_tracking="ignore_errors", model_kwargs=server),
        WorkspaceEnvironment(tools, asyncio.get_running_loop()),
        system_template="You work in a folder of files by commands for bash.",
        instance_template="{{task}}\nWhen the problem is solved, run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
        step_limit=turns,
    )
    await asyncio.to_thread(agent.run, problem)
