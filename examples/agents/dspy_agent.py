"""DSPy: a prediction by its default adapter. `pip install dspy`.

agent = { run = ["python", "examples/agents/dspy_agent.py"], answer_file = "answer.txt" }
"""

import json
import sys
from pathlib import Path

import dspy

task = json.loads(sys.stdin.readline())
dspy.configure(lm=dspy.LM("openai/policy", cache=False))  # a cached answer would not be sampled
program = dspy.Predict("question -> answer")
Path("answer.txt").write_text(str(program(question=task["messages"][-1]["content"]).answer))
