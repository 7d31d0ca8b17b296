"""A taskset of verifiers 0.4 with a harness of its own: reverse a word."""

from collections.abc import Iterable

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Asked", "Words"]

WORDS = ("river", "stone", "cloud", "bread", "plant", "green", "house", "train", "light", "sound", "night", "horse")


class Data(vf.TaskData):
    """A question and its truth."""

    truth: str


class Word(vf.Task[Data]):
    """One word; the reward is 1 for it backward."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Compares the last message with the truth."""
        return float((trace.branches[-1].messages[-1].content or "").strip() == self.data.truth)


class Words(vf.Taskset[Word, vf.TasksetConfig]):
    """A task per word."""

    def load(self) -> Iterable[Word]:
        """Gives all tasks."""
        for word in WORDS:
            yield Word(Data(prompt=f"reverse {word}", truth=word[::-1]), self.config.task)


class Asked(vf.Harness[vf.HarnessConfig]):
    """Asks the model once."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Runs one episode."""
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            messages = [{"role": "user", "content": data.prompt}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")
