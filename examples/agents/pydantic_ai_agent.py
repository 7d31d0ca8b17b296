"""Pydantic AI: a tool and a text, or `output`: a typed answer. `pip install 'pydantic-ai-slim[openai]'`.

agent = { run = ["python", "examples/agents/pydantic_ai_agent.py"], answer_file = "answer.txt" }
"""

import json
import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic_ai import Agent


class Sum(BaseModel):
    """Answer to the question."""

    answer: int


task = json.loads(sys.stdin.readline())
question = task["messages"][-1]["content"]
if "output" in sys.argv:
    result = Agent("openai-chat:policy", output_type=Sum).run_sync(question)
    answer = str(result.output.answer)
else:
    clerk = Agent("openai-chat:policy", instructions="Use the tool, then answer with the sum.")

    @clerk.tool_plain
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    answer = clerk.run_sync(question).output
Path("answer.txt").write_text(answer)
