"""OpenAI's Agents SDK with a shell tool whose commands run in a workspace. `pip install openai-agents`."""

import contextlib

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from shoal.workspace.tools import Tools


async def work(problem: str, tools: Tools, client: AsyncOpenAI, turns: int) -> None:
    """Lets the model work in a workspace for some turns."""
    agent = Agent(
        name="engineer",
        instructions="You work in a folder of files with a shell. When the problem is solved, answer DONE.",
        model=OpenAIChatCompletionsModel("policy", client),
        tools=[function_tool(tools.bash)],
    )
    with contextlib.suppress(MaxTurnsExceeded):  # the verdict is on the files as they are
        await Runner.run(agent, problem, max_turns=turns, run_config=RunConfig(tracing_disabled=True))
