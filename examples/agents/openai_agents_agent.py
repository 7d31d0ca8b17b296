"""OpenAI's Agents SDK: over Responses, its default, or `chat`. `pip install openai-agents`.

agent = { run = ["python", "examples/agents/openai_agents_agent.py"], answer_file = "answer.txt" }
"""

import json
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


set_tracing_disabled(True)  # traces would go to OpenAI
if "chat" in sys.argv:
    set_default_openai_api("chat_completions")
task = json.loads(sys.stdin.readline())
agent = Agent(name="clerk", instructions="Use the tool, then answer with the sum.", model="policy", tools=[add])
result = Runner.run_sync(agent, task["messages"][-1]["content"])
Path("answer.txt").write_text(str(result.final_output))
