"""Members that do not train: what a model behind a URL or a rule says becomes offers that a node takes."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shoal.config import RewardConfig, SwarmConfig, TaskConfig, parse
from shoal.errors import ConfigError, RequestRefused
from shoal.interfaces import Recogniser
from shoal.render import load_renderer
from shoal.rewards.scorer import WorkerScorer
from shoal.run.generating import answered_by
from shoal.swarm.chat import ChatModel, ModelAt
from shoal.swarm.exchange import MemoryHub
from shoal.swarm.generator import Answerer, Generator, Pace
from shoal.swarm.identity import Identity
from shoal.swarm.member import Means
from shoal.swarm.node import Node
from shoal.swarm.rules import RuleSolver
from shoal.tasks.library import Library
from shoal.tasks.recognise import OwnTasks
from shoal.types import Group, Split, Task
from until import until

TASKS = [TaskConfig(name="gcd", rewrite=[("Find the Greatest Common Divisor \\(GCD\\) of these numbers: ", "gcd ")])]


@contextmanager
def openai_server(status: int = 200) -> Iterator[str]:
    """Says 3, with the logprobs of its two tokens."""

    class Said(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["messages"][-1]["content"].startswith("gcd")
            logprobs = {"content": [{"token": "3", "logprob": -0.5}, {"token": "<end>", "logprob": -0.25}]}
            choice = {"message": {"content": "3"}, "finish_reason": "stop", "logprobs": logprobs}
            body = json.dumps({"choices": [choice]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Said)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def logprobs(rows: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[-1.0] * (len(row) - 1) for row in rows]


async def taken_from(
    answerer: Answerer, library: Library, own: Recogniser, folder: Path, model: Path, settings: SwarmConfig
) -> tuple[list[Group], Node, Generator]:
    """What a node takes of one generator that made six groups."""
    hub = MemoryHub()
    generator = Generator(
        hub.join(),
        own,
        library.services,
        answerer,
        Identity.fresh(),
        folder / "generator",
        swarm="reef",
        pace=Pace(4, 0.01, 6),
    )
    async with WorkerScorer(RewardConfig()) as scorer:
        means = Means(hub.join(), own, load_renderer(model), scorer, 256, "tiny")
        node = Node(means, settings, Identity.fresh(), folder / "node")
        running = asyncio.ensure_future(node.run())
        await generator.run()
        taken: list[Group] = []
        async with asyncio.timeout(30):
            while not taken:
                taken += await node.external_groups(0, logprobs)
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return taken, node, generator


def test_a_node_trains_on_what_a_rule_says_right_and_wrong(tmp_path: Path, tiny_model_dir: Path) -> None:
    with Library(TASKS, 0) as library:
        own = OwnTasks(library.services)
        settings = SwarmConfig(external_groups=1)
        found, _, generator = asyncio.run(
            taken_from(RuleSolver("truth", 0), library, own, tmp_path, tiny_model_dir, settings)
        )
        own.close()
    assert [rollout.reward.value for rollout in found[0].rollouts] == [1.0, 1.0, 0.0, 0.0]
    assert generator.tally.shared == 6
    status = json.loads((tmp_path / "generator" / "status.json").read_text())
    assert (status["shared"], status["generator"]) == (6, "rule")


def settled(node: Node) -> bool:
    """Whether a node has heard the three offers, and decided about them."""
    status = node.status()
    return status["admitted"] == 3 and not status["pending"] and node.ready


async def lives(own: OwnTasks, library: Library, folder: Path, model: Path) -> list[list[str]]:
    """The ids of what a node takes before and after its run is resumed, while the exchange still has everything."""
    hub, lives = MemoryHub(), list[list[str]]()
    rule, generator = RuleSolver("truth", 0), Identity.fresh()
    await Generator(
        hub.join(), own, library.services, rule, generator, folder / "generator", swarm="reef", pace=Pace(4, 0.01, 3)
    ).run()
    identity, settings = Identity.fresh(), SwarmConfig(external_groups=2)
    async with WorkerScorer(RewardConfig()) as scorer:
        means = Means(hub.join(), own, load_renderer(model), scorer, 256, "tiny")
        for _ in range(2):
            means = replace(means, exchange=hub.join())
            node = Node(means, settings, identity, folder / "node", trained=[id_ for life in lives for id_ in life])
            running = asyncio.ensure_future(node.run())
            await until(partial(settled, node))
            lives.append([group.id for group in await node.external_groups(0, logprobs)])
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    return lives


def test_a_resumed_node_takes_nothing_that_it_has_trained_on_before(tmp_path: Path, tiny_model_dir: Path) -> None:
    with Library(TASKS, 0) as library:
        own = OwnTasks(library.services)
        before, after = asyncio.run(lives(own, library, tmp_path, tiny_model_dir))
        own.close()
    assert before
    assert after
    assert not set(before) & set(after)


def only_truth(task: Task, n: int, rng: object) -> list[str]:
    return [task.answer or ""]


def test_with_its_own_skill_as_the_baseline_a_node_learns_from_a_single_answer(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    with Library(TASKS, 0) as library:
        own = OwnTasks(library.services)
        settings = SwarmConfig(external_groups=1, credit="skill")
        rule = RuleSolver(f"{__name__}:only_truth", 0)
        found, _, _ = asyncio.run(taken_from(rule, library, own, tmp_path, tiny_model_dir, settings))
        own.close()
    (rollout,) = found[0].rollouts
    assert rollout.reward.value == 1.0
    assert dict(rollout.reward.parts)["own_skill"] == 0.5


def test_a_model_behind_an_openai_url_answers_with_its_likelihoods() -> None:
    async def main(url: str, task: Task) -> None:
        async with ChatModel(ModelAt(url, "frozen")) as model:
            first, *rest = await model.answers(task, 3)
        assert (first.text, first.complete, first.logprob) == ("3", True, -0.75)
        assert rest == [first, first]

    with Library(TASKS, 0) as library, openai_server() as url:
        asyncio.run(main(url, library.services[0].draw(Split.TRAIN, 0)))


def test_a_model_that_refuses_the_first_question_ends_the_generator_with_its_sentence(tmp_path: Path) -> None:
    async def main(url: str, library: Library, own: OwnTasks) -> None:
        async with ChatModel(ModelAt(url, "frozen")) as model:
            generator = Generator(
                MemoryHub().join(), own, library.services, model, Identity.fresh(), tmp_path, swarm="reef"
            )
            await generator.run()

    with Library(TASKS, 0) as library, openai_server(401) as url:
        own = OwnTasks(library.services)
        with pytest.raises(BaseExceptionGroup) as raised:
            asyncio.run(main(url, library, own))
        own.close()
    assert raised.group_contains(RequestRefused, match="HTTP 401")


def test_a_generator_is_either_a_model_or_a_rule() -> None:
    config = parse({"tasks": [{"name": "gcd"}]})
    for model_url, rule in ((None, None), ("http://h/v1", "truth")):
        with pytest.raises(ConfigError, match="expected either --model-url or --rule"):
            answered_by(config, model_url, "m", "", rule)
