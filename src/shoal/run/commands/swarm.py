"""`shoal swarm join`, `desk` and `invite`: peers that do not train, and how others join them."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from shoal.config import Config
from shoal.config.urls import checked_url
from shoal.errors import ConfigError
from shoal.net.server import PER_ADDRESS, serving
from shoal.reward.service import RewardService
from shoal.run.join_swarm import joined_peer
from shoal.swarm.answerers import ChatModel, RuleSolver
from shoal.swarm.generator import Generator, GeneratorPace
from shoal.swarm.human.human_node import HumanNode
from shoal.swarm.human.questions import QuestionPace
from shoal.swarm.human.server import HumanServer
from shoal.swarm.wire.invitation import guest_key, invitation
from shoal.tasks.library import library_of
from shoal.types import Split

REPORT_S = 10.0
"""Seconds between two lines of a generator."""


def answerer_of(
    config: Config, model_url: str | None, model: str, key: str, rule: str | None
) -> ChatModel | RuleSolver:
    """Chooses a generator's answerer: exactly one of a model's URL and a rule. Raises `ConfigError`."""
    if (model_url is None) == (rule is None):
        raise ConfigError("swarm join: expected either --model-url or --rule; to train, use shoal train")
    if model_url is None:
        return RuleSolver(str(rule), config.seed)
    url, rollout = checked_url("--model-url", model_url), config.rollout
    return ChatModel(url, model, key, rollout.max_tokens, rollout.temperature)


def invite(config: Config, token: str, nkey: Path | None) -> dict[str, object]:
    """Figures of an invitation, with its `line`; makes the guest's key if so asked. Raises a `ShoalError`."""
    with library_of(config) as library:
        made = invitation(config, library.services, token, str(nkey or ""))
    public_key = guest_key(nkey) if nkey is not None else ""
    return {**asdict(made), "line": made.line, "public_key": public_key}


async def generate(
    config: Config,
    answerer: ChatModel | RuleSolver,
    pace: GeneratorPace,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Shares the groups of the pace; `say` gets a line first and then each `REPORT_S`. Raises a `ShoalError`."""
    async with AsyncExitStack() as stack:
        services = stack.enter_context(library_of(config)).services
        joined = await stack.enter_async_context(joined_peer(config, Path(config.run_dir), services))
        if isinstance(answerer, ChatModel):
            await stack.enter_async_context(answerer)
        generator = Generator(joined, services, answerer, pace)
        say(f"peer {generator.peer_id} answers for {', '.join(config.swarm.servers)}; Ctrl-C ends")

        async def report() -> None:
            while True:
                await asyncio.sleep(REPORT_S)
                state = "connected" if generator.connected else "not connected"
                say(f"{state}; groups shared {generator.tally.shared}{_because(str(generator.status()['failure']))}")

        async with asyncio.TaskGroup() as tasks:
            reporting = tasks.create_task(report(), name="generator: saying how it goes")
            await generator.run()
            reporting.cancel()


def _because(failure: str) -> str:
    return f"; {failure}" if failure else ""


async def serve_human(
    config: Config, folder: Path, pace: QuestionPace, *, host: str, port: int, announce: Callable[[str, str], None]
) -> None:
    """Asks people in the human UI until it is cancelled. `announce` gets two lines: URL and peer id.

    It loads no model: only tasks, rewards and swarm of the configuration are read. Raises a `ShoalError`.
    """
    async with AsyncExitStack() as stack:
        library = stack.enter_context(library_of(config))
        joined = await stack.enter_async_context(joined_peer(config, folder, library.services))
        scorer = await stack.enter_async_context(RewardService(config.reward))
        node = HumanNode(joined, scorer, partial(library.draw, Split.TRAIN), pace)
        async with serving(HumanServer(node).app, host, port, per_address=PER_ADDRESS) as url:
            announce(url, f"peer id {node.peer_id}")
            await node.run()
