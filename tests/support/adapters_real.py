"""The adapter of verifiers against the real package, in a separate environment: `make adapters`.

python tests/support/adapters_real.py VERIFIERS_PYTHON
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.echo import CONTEXT, EchoEngine, tokenizer
from benchmarks.work import CoinScorer
from shoal.gateway.host import Host
from shoal.model.chat_template import ChatRenderer
from shoal.rollout.agents.runner import AgentRunner
from shoal.tasks.remote_environment import RemoteEnvironment, TaskServer
from shoal.types import RolloutStatus, Sampling, Split

HERE = Path(__file__).parent


async def verifiers(python: str) -> None:
    """Served by a process with verifiers and without torch; two turns of each rollout are on the ledger."""
    with TaskServer(["guess"]) as hub:
        command = [python, "-m", "shoal.cli", "task", "serve", "vf_tasks:guess", "--orchestrator", hub.url]
        path = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE)])
        with subprocess.Popen(  # noqa: ASYNC220
            command, cwd=HERE, env={**os.environ, "PYTHONPATH": path}
        ) as process:
            try:
                service = RemoteEnvironment("guess", hub)
                await asyncio.to_thread(service.await_worker, 60.0)
                made = tokenizer()
                renderer, sampling = ChatRenderer(made, (made.eos_token_id,)), Sampling(64, seed=0)
                async with Host.open(EchoEngine(0, 0), renderer, max_model_len=CONTEXT) as host:
                    runner = AgentRunner(host, service.rollout, CoinScorer(), sampling, timeout_s=30.0)
                    task = await service.drawn(Split.TRAIN, 0)
                    rollouts = await runner.rollouts(task, 4)
            finally:
                process.kill()
    for rollout in rollouts:
        assert rollout.status is RolloutStatus.FINISHED, rollout.reason
        assert len(rollout.turns) == 2
        assert rollout.reward.value == 4.0
        first, second = rollout.turns
        assert (first.parent, second.parent) == (None, 0)


if __name__ == "__main__":
    asyncio.run(verifiers(str(Path(sys.argv[1]).absolute())))  # not what it links to
    sys.stdout.write("verifiers: as it should be\n")
