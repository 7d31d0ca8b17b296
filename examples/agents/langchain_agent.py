"""LangChain: its agent; `output` and `functions`: a typed answer, by format or tool.

`pip install langchain langchain-openai`

    agent = { run = ["python", "examples/agents/langchain_agent.py"], answer_file = "answer.txt" }
"""

import json
import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    """Answer to the question."""

    answer: int


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


task = json.loads(sys.stdin.readline())
question = task["messages"][-1]["content"]
model = ChatOpenAI(model="policy")
conversation = {"messages": [("user", question)]}
if "output" in sys.argv:
    answer = model.with_structured_output(Sum).invoke(question).answer
elif "functions" in sys.argv:
    answer = model.with_structured_output(Sum, method="function_calling").invoke(question).answer
else:
    agent = create_agent(model, tools=[add], system_prompt="Use the tool, then answer with the sum.")
    answer = agent.invoke(conversation)["messages"][-1].content
Path("answer.txt").write_text(str(answer))
