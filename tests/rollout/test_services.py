"""Task services in processes of their own under a real orchestrator: they are killed, they fail, they come back."""

import asyncio
import os
from pathlib import Path

import pytest

from benchmarks import run_bench
from benchmarks.crew import Process
from benchmarks.echo import CONTEXT, EchoEngine, tokenizer
from benchmarks.work import CoinScorer
from services_kill import NAMES, run
from shoal.errors import TaskError
from shoal.gateway.host import Host
from shoal.interfaces import Environment
from shoal.model.chat_template import ChatRenderer
from shoal.rehearsal.clock import run_virtual
from shoal.rollout.agents.runner import AgentRunner
from shoal.rollout.orchestrator import ANOTHER, BAD_IN_A_ROW, Health, Source, attend
from shoal.rollout.single_turn import failed
from shoal.tasks.remote_environment import EnvironmentScorer, RemoteEnvironment, TaskServer
from shoal.tasks.sdk import EnvironmentFailed
from shoal.types import Rollout, RolloutStatus, Sampling, Split, Task

HERE = Path(__file__).parents[1].joinpath("support")


def test_killed_services_go_on_within_seconds_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    figures = asyncio.run(run(24, tmp_path / "run", kills=1))
    assert figures["groups"] == 24
    assert figures["doubled"] == 0
    assert figures["audit_ok"], figures["audit"]
    assert figures["recovered_s"].keys() == {NAMES[0]}  # type: ignore[attr-defined]
    assert figures["off_target"] <= 0.05


def test_the_orchestrator_benchmark_loses_nothing() -> None:
    report = run_bench("orchestrator", quick=True)
    assert {"concurrent", "lost", "overhead_us_per_rollout", "bytes_per_rollout"} <= report.keys()
    assert report["lost"] == 0


async def played(name: str, path: str, wanted) -> list[Rollout]:
    """The rollouts of the wanted tasks of a served task, over HTTP and on sessions; those that hang have 5 s."""
    with TaskServer([name]) as server:
        process = Process(path, server.url, name=name, folder=HERE)
        try:
            service = RemoteEnvironment(name, server)
            await asyncio.to_thread(service.await_worker, 120.0)
            tasks: list[Task] = [await service.drawn(Split.TRAIN, index) for index in range(40)]
            made = tokenizer()
            renderer = ChatRenderer(made, (made.eos_token_id,))
            sampling = Sampling(64, seed=0)
            async with Host.open(EchoEngine(0, 0), renderer, max_model_len=CONTEXT) as host:
                scorer = EnvironmentScorer({name: service}, CoinScorer())
                runners = [AgentRunner(host, service.rollout, scorer, sampling, timeout_s=one) for one in (60.0, 5.0)]
                asked = [(runners["hang" in task.messages[0].content], task) for task in wanted(tasks)]
                answered = await asyncio.gather(*(runner.rollouts(task, n=1) for runner, task in asked))
                assert process.is_running
                return [rollout for (rollout,) in answered]
        finally:
            process.kill()


def one_of_each(tasks: list[Task]) -> list[Task]:
    return list({task.messages[0].content.split()[0]: task for task in tasks}.values())


def test_what_the_policy_did_is_trained_with_and_what_the_environment_did_is_not() -> None:
    rollouts = asyncio.run(played("moods", "service_tasks:Moods", one_of_each))
    came_to = {
        rollout.messages[0].content.split()[0]: (rollout.status, rollout.reason.partition(":")[0], rollout.reward.value)
        for rollout in rollouts
    }
    assert came_to.pop("hang")[0] is RolloutStatus.FAILED
    assert came_to == {
        "policy": (RolloutStatus.TRUNCATED, "policy", 0.0),
        "environment": (RolloutStatus.FAILED, "environment", 0.0),
        "raise": (RolloutStatus.FAILED, "environment", 0.0),
        "reward": (RolloutStatus.FINISHED, "", 0.5),
        "nothing": (RolloutStatus.FINISHED, "", 0.25),
    }
    assert all(len(rollout.turns) == 1 for rollout in rollouts)


def test_a_service_that_rests_is_left_alone_for_longer_each_time_until_something_comes_of_it() -> None:
    health = Health()
    rests_s = [health.ended(usable=False) for _ in range(3 * BAD_IN_A_ROW)]
    assert [rest_s for rest_s in rests_s if rest_s] == [5.0, 10.0, 20.0]
    assert health.ended(usable=True) == 0
    assert [health.ended(usable=False) for _ in range(BAD_IN_A_ROW)][-1] == 5.0


def test_a_source_lends_its_share_while_it_is_not_served_or_rests() -> None:
    told: list[tuple[float, bool]] = []

    async def useless(task: Task, *, turns: object) -> tuple[Rollout, ...]:
        return (failed(task, 0, "broken"),)

    async def main() -> None:
        clock, server = asyncio.get_running_loop().time, TaskServer(["x"])
        source = Source(
            Broken([]), useless, on_presence=lambda _, there: told.append((clock(), there)), health=Health()
        )
        source.environment.name = "x"
        attend(server, [source], lambda: None)
        server.on_workers("x", True)
        await asyncio.sleep(1)
        for _ in range(BAD_IN_A_ROW):
            await source.rollouts(Task("x/0", "x", ()))
        server.on_workers("x", False)
        await asyncio.sleep(7)
        server.on_workers("x", True)
        await asyncio.sleep(1)

    run_virtual(main())
    assert told == [(0, False), (0, True), (1, False), (8, True)]


class Broken(Environment):
    """An environment whose first questions cannot be drawn."""

    name = "broken"

    def __init__(self, failures: list[Exception]) -> None:
        self.failures = failures

    async def drawn(self, split: Split, index: int) -> Task:
        if self.failures:
            raise self.failures.pop()
        return Task(f"broken/{split}/{index}", self.name, ())


async def nothing(task: Task, *, turns: object) -> tuple[Rollout, ...]:
    return ()


def test_an_environment_that_asks_for_another_attempt_lends_its_share_and_is_asked_ever_less_often() -> None:
    told: list[tuple[str, bool]] = []
    failing = Broken([EnvironmentFailed("the server left", retry=True)] * 9)
    source = Source(failing, nothing, on_presence=lambda name, present: told.append((name, present)))

    async def main() -> float:
        assert (await source.draw(3)).id == f"broken/train/{3 + 9 * ANOTHER}"
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == sum((0.5, 1, 2, 4, 8, 16, 32, 60, 60))
    assert told == [("broken", False), ("broken", True)]
    failing.failures.append(EnvironmentFailed("no such game"))
    with pytest.raises(TaskError, match="broken: no question at 4: no such game"):
        asyncio.run(source.draw(4))


def test_a_rollout_whose_service_dies_begins_again_elsewhere_and_what_was_drawn_before_is_given_up(
    tmp_path: Path,
) -> None:
    os.environ["MORTAL_FLAG"] = str(tmp_path / "died")

    async def main() -> Rollout:
        with TaskServer(["mortal"]) as server:
            processes = [Process("service_tasks:Mortal", server.url, name="mortal", folder=HERE)]
            try:
                service = RemoteEnvironment("mortal", server)
                await asyncio.to_thread(service.await_worker, 120.0)
                task = await service.drawn(Split.TRAIN, 0)
                made = tokenizer()
                renderer, sampling = ChatRenderer(made, (made.eos_token_id,)), Sampling(64, seed=0)
                async with Host.open(EchoEngine(0, 0), renderer, max_model_len=CONTEXT) as host:
                    runner = AgentRunner(host, service.rollout, CoinScorer(), sampling, timeout_s=120.0)
                    rolling = asyncio.create_task(runner.rollouts(task, 1))
                    await asyncio.to_thread(processes[0].wait)
                    processes.append(Process("service_tasks:Mortal", server.url, name="mortal", folder=HERE))
                    (rollout,) = await rolling
                assert server.services["mortal"].counts["rollout lost"] == 1
                return rollout
            finally:
                for process in processes:
                    process.kill()

    rollout = asyncio.run(main())
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0)
    assert len(rollout.turns) == 2, "of the second attempt only"
