"""An agent as a program: whatever it is written in, it finds the model in its environment.

    [[tasks]]
    agent = { run = ["python", "examples/agents/guess_process.py"], score = "agent" }

The task comes as a line of JSON, the outcome goes to the descriptor that SHOAL_OUTCOME_FD names. It runs no command of
the model, so it may say its own reward. Nothing here imports Shoal.
"""

import json
import os
import re
import sys

import anthropic

task = json.loads(sys.stdin.readline())
game = json.loads(task["info"])["info"]
low, high = game["low"], game["high"]
client = anthropic.Anthropic()  # ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
messages = [{"role": "user", "content": f"{low}-{high}"}]
reward = 0.0
for _ in range(3):
    answer = client.messages.create(model="policy", max_tokens=16, messages=messages)
    said = "".join(block.text for block in answer.content if block.type == "text")
    found = re.search(r"\d+", said)
    number = int(found[0]) if found else -1
    if number == game["number"]:
        reward = 1.0
        break
    if low <= number <= high:
        low, high = (number + 1, high) if number < game["number"] else (low, number - 1)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"{low}-{high}"}]
os.write(int(os.environ["SHOAL_OUTCOME_FD"]), json.dumps({"reward": reward}).encode())
