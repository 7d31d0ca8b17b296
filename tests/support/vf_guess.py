"""A verifiers 0.4 taskset with an in-process harness: say the letter that is asked for, in two turns."""

from collections.abc import Iterable

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["TwoTurns", "VfGuess"]


class Data(vf.TaskData):
    letter: str


class Letter(vf.Task[Data]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.branches[-1].messages))


class VfGuess(vf.Taskset[Letter, vf.TasksetConfig]):
    def load(self) -> Iterable[Letter]:
        for number in range(60):
            letter = "abcdefgh"[number % 8]
            yield Letter(Data(prompt=f"{number}: say {letter}", letter=letter), self.config.task)


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                said = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages += [{"role": "assistant", "content": said.choices[0].message.content}]
                messages += [{"role": "user", "content": "again"}]
        return vf.ProgramResult(0, "", "")
