"""Haystack's agent. `pip install haystack-ai`.

agent = { run = ["python", "examples/agents/haystack_agent.py"], answer_file = "answer.txt" }
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool


@tool
def add(a: Annotated[int, "the first number"], b: Annotated[int, "the second number"]) -> str:
    """Adds two numbers."""
    return str(a + b)


task = json.loads(sys.stdin.readline())
model = OpenAIChatGenerator(model="policy", api_base_url=os.environ["OPENAI_BASE_URL"])
agent = Agent(chat_generator=model, tools=[add], system_prompt="Use the tool, then answer with the sum.")
result = agent.run(messages=[ChatMessage.from_user(task["messages"][-1]["content"])])
Path("answer.txt").write_text(result["last_message"].text or "")
