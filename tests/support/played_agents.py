"""Rollouts of an agent at a scripted engine."""

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from chat_templates import renderer
from gateway_engine import CONTEXT, ScriptedEngine
from shoal.config import RewardConfig
from shoal.gateway.host import Host
from shoal.interfaces import Scorer
from shoal.reward.service import RewardService
from shoal.rollout.agents.runner import AgentRunner, Play
from shoal.types import Message, Reward, Role, Rollout, Sampling, Task

TASK = Task("t/0", "t", (Message(Role.USER, "what is 2 + 3?"),), "5", '{"scorer": "number"}')


class Truth:
    """Implements `interfaces.Scorer` without processes: 1 for an answer that ends in the truth."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        return [Reward(float(answer.endswith(str(task.answer)))) for answer in answers]


def played(
    playing: AbstractAsyncContextManager[Play],
    *script: str | None,
    task: Task = TASK,
    timeout_s: float = 60.0,
    n: int = 1,
    max_model_len: int = CONTEXT,
    delay_s: float = 0.0,
    scoring: Scorer | None = None,
    real_scorer: bool = False,
    max_at_once: int | None = 32,
) -> list[Rollout]:
    """The rollouts of an agent at a scripted engine, over HTTP."""

    async def main() -> list[Rollout]:
        made = renderer("qwen3")
        engine = ScriptedEngine(made, list(script), delay_s=delay_s)
        hosting = Host.open(engine, made, max_model_len=max_model_len)
        async with contextlib.AsyncExitStack() as stack:
            scorer: Scorer = scoring or Truth()
            if real_scorer:
                scorer = await stack.enter_async_context(RewardService(RewardConfig()))
            host = await stack.enter_async_context(hosting)
            play = await stack.enter_async_context(playing)
            runner = AgentRunner(
                host, play, scorer, Sampling(200, seed=0), timeout_s=timeout_s, most_at_once=lambda: max_at_once
            )
            rollouts = list(await runner.rollouts(task, n))
            assert len(host.gateway.sessions) == 0, "every session was ended"
        drawn = sorted(len(completion.token_ids) for completion in engine.drawn)
        kept = sorted(len(turn.completion.token_ids) for one in rollouts for turn in one.turns)
        assert kept == drawn, "every drawn token is in exactly one turn"
        return rollouts

    return asyncio.run(main())
