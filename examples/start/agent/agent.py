"""The agent of run.toml: any program that speaks with an OpenAI client. Its tokens are trained as they were sampled."""

from openai import AsyncOpenAI

from shoal.types import Task


async def there_and_back(task: Task, client: AsyncOpenAI) -> float:
    """Has a word reversed, and the answer reversed again; each step that is right earns half of the reward."""
    word = task.messages[-1].content.removeprefix("reverse ")
    backward = await asked(client, word)
    forward = await asked(client, backward[:8])
    return 0.5 * (backward == task.answer) + 0.5 * (forward == word)


async def asked(client: AsyncOpenAI, word: str) -> str:
    """Asks the model that is being trained."""
    said = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": f"reverse {word}"}]
    )
    return (said.choices[0].message.content or "").strip()
