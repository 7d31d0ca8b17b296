"""The adapters against the real packages, each in an environment of its own: `make adapters`.

python tests/support/adapters_real.py VERIFIERS_PYTHON OPENENV_PYTHON
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from benchmarks.echo import CONTEXT, EchoEngine, tokenizer
from benchmarks.work import CoinScorer
from openenv_game_client import played_game
from shoal.gateway.host import Host
from shoal.model.chat_template import ChatRenderer
from shoal.rollout.agents.runner import AgentRunner
from shoal.tasks.remote_environment import RemoteEnvironment
from shoal.tasks.remote_server import TaskServer
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


def openenv(python: str) -> None:
    """The game of `openenv_game`, behind the real server."""
    port = 18765
    with subprocess.Popen([python, str(HERE / "openenv_game.py"), str(port)]) as process:
        try:
            for _ in range(60):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                time.sleep(1)
            played_game(f"http://127.0.0.1:{port}")
        finally:
            process.kill()


if __name__ == "__main__":
    verifiers_python, openenv_python = (str(Path(path).absolute()) for path in sys.argv[1:])  # not what they link to
    asyncio.run(verifiers(verifiers_python))
    openenv(openenv_python)
    sys.stdout.write("verifiers and OpenEnv: as they should be\n")
