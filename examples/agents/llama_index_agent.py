"""LlamaIndex's function agent, which streams. `pip install llama-index-core llama-index-llms-openai-like`.

agent = { run = ["python", "examples/agents/llama_index_agent.py"], answer_file = "answer.txt" }
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def answer(question: str) -> str:
    """Runs the agent on a question."""
    model = OpenAILike(
        model="policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
    )
    agent = FunctionAgent(tools=[add], llm=model, system_prompt="Use the tool, then answer with the sum.")
    return str(await agent.run(question))


task = json.loads(sys.stdin.readline())
Path("answer.txt").write_text(asyncio.run(answer(task["messages"][-1]["content"])))
