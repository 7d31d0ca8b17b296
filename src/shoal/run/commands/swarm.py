"""`shoal swarm join`, `desk` and `invite`: peers that do not train, and how others join them; `shoal judge serve`."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from shoal.config import Config, RewardConfig, TaskConfig, load
from shoal.config.urls import checked_url
from shoal.errors import ConfigError, RunDirError
from shoal.net.identity import Identity
from shoal.net.server import PER_ADDRESS, serving, until_cancelled
from shoal.reward.service import RewardService
from shoal.run.join_swarm import FOLDER, joined_peer
from shoal.swarm.generator import ChatModel, Generator, GeneratorPace, RuleSolver
from shoal.swarm.human.human_node import HumanNode, QuestionPace
from shoal.swarm.human.server import HumanServer
from shoal.swarm.judge.judging import Judge, JudgeServer, Rules
from shoal.swarm.judge.store import JudgeStore
from shoal.swarm.peer import KNOWN_FILE, read_lines
from shoal.swarm.wire.invitation import guest_key, invitation, known_peers
from shoal.tasks.library import library_of
from shoal.tasks.procedural_client import ProceduralClient, ReasoningGymService, Spec
from shoal.types import Split

MOST_NAMED = 16
"""Peers that an invitation names."""
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
        made = invitation(config, library.services, _known(config), token, str(nkey or ""))
    public_key = guest_key(nkey) if nkey is not None else ""
    return {**asdict(made), "line": made.line, "public_key": public_key}


def _known(config: Config) -> list[str]:
    """Ids of a run's own node and of some peers that it trusts; none before its first start. Raises `ShoalError`."""
    folder = Path(config.run_dir) / FOLDER
    own = [Identity.load(key).peer_id] if (key := folder / "identity.pem").exists() else []
    try:
        return list(dict.fromkeys([*own, *known_peers(), *read_lines(folder / KNOWN_FILE)]))[:MOST_NAMED]
    except OSError as error:
        raise RunDirError(f"{folder / KNOWN_FILE} cannot be read: {error.strerror}") from error


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


NINE = (
    *("base_conversion", "basic_arithmetic", "arc_1d", "bf", "propositional_logic", "fraction_simplification"),
    *("decimal_arithmetic", "calendar_arithmetic", "binary_matrix"),
)
"""Specialties of SAPO, with the settings of reasoning-gym."""
SCORE_TIMEOUT_S = 3.0


async def serve_judge(
    config: Path | None,
    folder: Path,
    rules: Rules,
    *,
    host: str,
    port: int,
    workers: int,
    announce: Callable[[str, str], None],
) -> None:
    """Judges until it is cancelled. `announce` gets two lines: URL and peer id. Raises a `ShoalError`."""
    tasks = load(config).tasks if config else [TaskConfig(name=name) for name in NINE]
    identity = Identity.load(folder / "identity.pem")
    async with AsyncExitStack() as stack:
        drawer = stack.enter_context(ProceduralClient())
        specialties = [specialty_of(task, drawer) for task in tasks]
        if len({one.dataset for one in specialties}) != len(specialties):
            raise ConfigError("tasks: a judge asks each dataset with one configuration")
        store = JudgeStore(folder)
        stack.callback(store.close)
        rewards = RewardConfig(workers=workers, timeout_s=SCORE_TIMEOUT_S)
        scorer = await stack.enter_async_context(RewardService(rewards))
        judge = Judge(store, identity, specialties, drawer, scorer, rules)
        judge.ledger()  # committed before the first request
        async with serving(JudgeServer(judge).app, host, port, per_address=PER_ADDRESS) as url:
            announce(url, f"peer id {judge.peer_id}")
            await until_cancelled()


def specialty_of(task: TaskConfig, drawer: ProceduralClient) -> Spec:
    """Settings of a task's questions. Raises `TaskError`, or `ConfigError` for a task that the judge could not
    draw and score."""
    if task.service != "reasoning_gym" or task.scorer is not None:
        raise ConfigError(f"tasks.{task.name}: a judge asks reasoning-gym datasets with their own scorers only")
    return ReasoningGymService(task, 0, drawer).spec
