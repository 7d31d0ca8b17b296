"""LiteLLM: a loop of completions and tool calls. `pip install litellm mcp`.

agent = { run = ["python", "examples/agents/litellm_agent.py"], answer_file = "answer.txt" }
"""

import json
import sys
from pathlib import Path

import litellm

TURNS = 4
ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
task = json.loads(sys.stdin.readline())
messages = task["messages"]
for _ in range(TURNS):
    tools = [{"type": "function", "function": ADD}]
    said = litellm.completion("openai/policy", messages=messages, tools=tools).choices[0].message
    if not said.tool_calls:
        Path("answer.txt").write_text(said.content or "")
        break
    messages.append(said)
    for call in said.tool_calls:
        given = json.loads(call.function.arguments)
        result = str(given["a"] + given["b"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
