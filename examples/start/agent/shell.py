"""The agent of shell.toml: the model's shell commands run here, and the task's scorer judges what they left.

Shoal starts it once for each rollout, in a folder of the rollout's own, with all other files out of reach.
"""

import json
import re
import subprocess
import sys

from openai import OpenAI

TURNS = 4
RULES = "Commands in a ```sh block are run. Write the answer to answer.txt, then say: done."
task = json.loads(sys.stdin.readline())  # without the truth
client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are the rollout's session
messages = [*({"role": one["role"], "content": one["content"]} for one in task["messages"])]
messages[-1]["content"] += f"\n\n{RULES}"
for _ in range(TURNS):
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
    commands = re.search(r"```sh\n(.*?)```", answer, re.DOTALL)
    if commands is None:
        break
    ran = subprocess.run(
        ["sh", "-c", commands[1]], capture_output=True, text=True, errors="replace", timeout=10, check=False
    )
    said = (ran.stdout + ran.stderr)[-1000:]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": said or "(no output)"}]
