"""Anthropic's SDK with its tool runner. `pip install anthropic`.

agent = { run = ["python", "examples/agents/anthropic_agent.py"], answer_file = "answer.txt" }
"""

import json
import sys
from pathlib import Path

from anthropic import Anthropic, beta_tool


@beta_tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a + b)


task = json.loads(sys.stdin.readline())
runner = Anthropic().beta.messages.tool_runner(
    model="policy",
    max_tokens=256,
    system="Use the tool, then answer with the sum.",
    tools=[add],
    messages=[{"role": one["role"], "content": one["content"]} for one in task["messages"]],
)
said = runner.until_done()
Path("answer.txt").write_text("".join(block.text for block in said.content if block.type == "text"))
