"""instructor: an answer of a Pydantic model, by its default mode, a tool. `pip install instructor`.

agent = { run = ["python", "examples/agents/instructor_agent.py"], answer_file = "answer.txt" }
"""

import json
import sys
from pathlib import Path

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    """Answer to the question."""

    answer: int


task = json.loads(sys.stdin.readline())
client = instructor.from_openai(OpenAI())
result = client.chat.completions.create(model="policy", messages=task["messages"], response_model=Sum)
Path("answer.txt").write_text(str(result.answer))
