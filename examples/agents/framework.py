"""An agent of a framework, unchanged: OpenAI's Agents SDK (`pip install openai-agents`) with the client it is given.

[[tasks]]
agent = "examples.agents.framework:guess"         # for the embedded model, which knows no tools
agent = "examples.agents.framework:calculate"     # for models whose chat template has tools
"""

import json
import re

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from shoal.environments.games import value_of
from shoal.types import Task

set_tracing_disabled(True)


async def guess(task: Task, client: AsyncOpenAI) -> float:
    """Plays one game of guessing a number; the framework keeps the conversation."""
    game = json.loads(task.info)["info"]
    low, high = game["low"], game["high"]
    player = Agent(name="player", model=OpenAIChatCompletionsModel("policy", client))
    items = [{"role": "user", "content": f"{low}-{high}"}]
    for _ in range(3):
        result = await Runner.run(player, items)
        found = re.search(r"\d+", str(result.final_output))
        number = int(found[0]) if found else -1
        if number == game["number"]:
            return 1.0
        if low <= number <= high:
            low, high = (number + 1, high) if number < game["number"] else (low, number - 1)
        items = [*result.to_input_list(), {"role": "user", "content": f"{low}-{high}"}]
    return 0.0


@function_tool
def calculator(expression: str) -> str:
    """The exact value of an expression of numbers, + - * / and parentheses."""
    return value_of(expression)


async def calculate(task: Task, client: AsyncOpenAI) -> float:
    """Has the model use a tool of the framework, over OpenAI's Responses API; compares what it says in the end."""
    clerk = Agent(
        name="clerk",
        instructions="Use the calculator.",
        model=OpenAIResponsesModel("policy", client),
        model_settings=ModelSettings(parallel_tool_calls=True),
        tools=[calculator],
    )
    result = await Runner.run(clerk, task.messages[-1].content)
    return float(str(result.final_output).strip().endswith(str(task.answer)))
