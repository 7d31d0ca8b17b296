"""An agent of fifty lines: the model answers with commands for bash until it says that it is done.

    shoal tasks from-package h11 --most 20 && shoal tasks read tasks/h11-0.16.0 --out tasks.jsonl
    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=x python examples/swe/bare_loop.py tasks.jsonl

Any server of OpenAI's chat API answers. In training that is the run's gateway (swe.py), which keeps the sampled tokens.
"""

import asyncio
import re
import sys
from pathlib import Path

from openai import AsyncOpenAI

from shoal.workspace.judge import judge
from shoal.workspace.task import opened, tasks_in
from shoal.workspace.tools import Tools

SYSTEM = (
    "You work in a folder of files. Answer with one command between ```bash and ```, and you see what it prints. "
    "When the problem is solved, answer DONE."
)
COMMAND = re.compile(r"```(?:bash|sh)?\n(.*?)```", re.DOTALL)


async def work(problem: str, tools: Tools, client: AsyncOpenAI, turns: int) -> None:
    """Lets the model work in a workspace for some turns."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}]
    for _ in range(turns):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        if (command := COMMAND.search(said)) is None:
            return
        messages.append({"role": "user", "content": await tools.bash(command[1]) or "(it printed nothing)"})


async def main(file: Path, turns: int = 8) -> None:
    """Plays each task of a file, and prints the verdicts."""
    async with AsyncOpenAI() as client:
        for task in tasks_in(file):
            with await opened(task) as workspace:
                await work(task.problem, Tools(workspace), client, turns)
                print(task.id, (await judge(workspace, task)).reward, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
