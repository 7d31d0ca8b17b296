"""mini-swe-agent: the model works in a shell and submits its last command's output. `pip install mini-swe-agent mcp`.

agent = { run = ["python", "examples/agents/mini_swe_agent_agent.py"], answer_file = "answer.txt" }
"""

import json
import sys
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
task = json.loads(sys.stdin.readline())
agent = DefaultAgent(
    LitellmModel(model_name="openai/policy", cost_tracking="ignore_errors"),  # the model has no price
    LocalEnvironment(),
    system_template="You work in a shell.",
    instance_template=f"{{{{task}}}}\nTo submit, print the answer after the line of `{SUBMIT}`, in the same command.",
    step_limit=4,
)
Path("answer.txt").write_text(agent.run(task["messages"][-1]["content"])["submission"])
