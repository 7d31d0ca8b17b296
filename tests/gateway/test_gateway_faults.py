"""An engine process that is killed while it answers: a clear status, and its successor answers the same request."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import openai
import pytest

from benchmarks import child_environment
from benchmarks.echo import CONTEXT, tokenizer
from shoal.engine.server.http_client import HttpEngine
from shoal.gateway.server import Gateway
from shoal.model.chat_template import ChatRenderer
from shoal.net.listening import free_port
from shoal.net.server import serving
from shoal.trainer.advantage import rows
from shoal.types import Reward, Rollout
from until import until

ASK: list[Any] = [{"role": "user", "content": "what is 3 + 4?"}]


@contextmanager
def engine_process(port: int, seconds: float) -> "Iterator[tuple[subprocess.Popen[str], str]]":
    """Answers `/inference/v1/generate` as engines do, in so many seconds."""
    command = [sys.executable, "-m", "benchmarks.echo", str(seconds), str(seconds), str(port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment()
    ) as child:
        assert child.stdout is not None
        try:
            yield child, child.stdout.readline().strip()
        finally:
            child.kill()


async def test_an_engine_killed_mid_answer_is_reported_and_its_successor_answers_the_retry() -> None:
    made = tokenizer()

    async def scenario(gateway: Gateway, url: str, dying: "subprocess.Popen[str]", port: int) -> None:
        session = gateway.sessions.open()
        async with openai.AsyncOpenAI(base_url=f"{url}/s/{session.token}/v1", api_key="-", max_retries=0) as client:
            asked = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK, seed=1))
            await until(lambda: bool(session.tree.calls))
            dying.kill()
            with pytest.raises(openai.InternalServerError, match="no answer from") as refused:
                await asked
            assert refused.value.status_code == 503
            assert not session.tree.calls
            assert not session.tree.generations
            with engine_process(port, 0.01):
                retry = {"x-stainless-retry-count": "1"}
                for _ in range(2):  # the second is answered from the ledger
                    await client.chat.completions.create(model="m", messages=ASK, seed=1, extra_headers=retry)
        (row,) = rows(Rollout("r", (), session.tree.turns(), Reward(1.0)), 1.0)
        assert sum(row.mask) == len(session.tree.generations[0].completion.token_ids) > 0

    port = free_port()
    with engine_process(port, 30.0) as (dying, engine_url):
        async with aclosing(HttpEngine(engine_url)) as engine:
            gateway = Gateway(engine, ChatRenderer(made, (made.eos_token_id,)), max_model_len=CONTEXT)
            async with serving(gateway.app, grace_s=1) as url:
                await scenario(gateway, url, dying, port)
