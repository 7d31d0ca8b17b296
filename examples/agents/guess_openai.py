"""An agent as an async function: it is given a task and an OpenAI client that speaks with the model being trained.

[[tasks]]
agent = "examples.agents.guess_openai:guess"
"""

import json
import re

from openai import AsyncOpenAI

from shoal.types import Task


async def guess(task: Task, client: AsyncOpenAI) -> float:
    """Plays one game of guessing a number; the reward is 1 when it is found in three tries."""
    game = json.loads(task.info)["info"]
    low, high = game["low"], game["high"]
    messages = [{"role": "user", "content": f"{low}-{high}"}]
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content or ""
        found = re.search(r"\d+", said)
        number = int(found[0]) if found else -1
        if number == game["number"]:
            return 1.0
        if low <= number <= high:
            low, high = (number + 1, high) if number < game["number"] else (low, number - 1)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"{low}-{high}"}]
    return 0.0
