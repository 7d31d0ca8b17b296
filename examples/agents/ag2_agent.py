"""AG2's agent, over chat. `pip install 'ag2[openai]'`.

agent = { run = ["python", "examples/agents/ag2_agent.py"], answer_file = "answer.txt" }
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from ag2 import Agent, tool
from ag2.config import OpenAIConfig


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def answer(question: str) -> str:
    """Runs the agent on a question."""
    model = OpenAIConfig(model="policy", base_url=os.environ["OPENAI_BASE_URL"])
    agent = Agent("clerk", prompt="Use the tool, then answer with the sum.", config=model, tools=[add])
    return str((await agent.ask(question)).body)


task = json.loads(sys.stdin.readline())
Path("answer.txt").write_text(asyncio.run(answer(task["messages"][-1]["content"])))
