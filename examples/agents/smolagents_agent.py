"""smolagents: an agent of tool calls, or `code`: one that writes Python. `pip install 'smolagents[openai]'`.

agent = { run = ["python", "examples/agents/smolagents_agent.py"], answer_file = "answer.txt" }
"""

import json
import os
import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


task = json.loads(sys.stdin.readline())
model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
kind = CodeAgent if "code" in sys.argv else ToolCallingAgent
agent = kind(tools=[add], model=model, max_steps=4)
Path("answer.txt").write_text(str(agent.run(task["messages"][-1]["content"])))
