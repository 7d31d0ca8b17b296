"""Members that do not train: what a model behind a URL or a rule says becomes offers that a node takes."""

import asyncio
import json
import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.memory_swarm import MemorySwarm
from shoal.config import Config, RewardConfig, SwarmConfig, TaskConfig, parse
from shoal.errors import ConfigError, EngineUnavailable, RequestRefused, ShoalError
from shoal.model.renderer_loading import load_renderer
from shoal.net.identity import Identity
from shoal.net.listening import free_port
from shoal.reward.service import RewardService
from shoal.run.commands.swarm import answerer_of
from shoal.run.standstill import waits
from shoal.swarm.generator import Answerer, ChatModel, Generator, GeneratorPace, RuleSolver, slip
from shoal.swarm.node import Node
from shoal.swarm.peer import RETRY_S, Joined
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.trust.ingress import IngressFilter, Recogniser, VerifiedMessage
from shoal.swarm.wire.offer import MAX_ROLLOUTS, GeneratorKind, Offer, OfferedRollout
from shoal.tasks.jsonl import JsonlService
from shoal.tasks.library import Library
from shoal.types import Group, Split, Task
from until import until

TASKS = [TaskConfig(name="gcd", rewrite=[("Find the Greatest Common Divisor \\(GCD\\) of these numbers: ", "gcd ")])]


@contextmanager
def openai_server(status: int = 200, models: Sequence[str] = ("frozen",)) -> Iterator[str]:
    """Says 3."""

    class Said(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["messages"][-1]["content"].startswith("gcd")
            choice = {"message": {"content": "3"}, "finish_reason": "stop"}
            self.answer({"choices": [choice]})

        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            self.answer({"data": [{"id": name} for name in models]})

        def answer(self, said: object) -> None:
            body = json.dumps(said).encode()
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
    hub = MemorySwarm()
    config = Config(tasks=TASKS, swarm=settings)
    joined = Joined(hub.join(), own, Identity.fresh(), folder / "generator", config)
    generator = Generator(joined, library.services, answerer, GeneratorPace(4, 0.01, 6))
    async with RewardService(RewardConfig()) as scorer:
        joined = Joined(hub.join(), own, Identity.fresh(), folder / "node", config)
        node = Node(joined, scorer, load_renderer(model), 256)
        running = asyncio.ensure_future(node.run())
        await generator.run()
        taken: list[Group] = []
        async with asyncio.timeout(120):
            while not taken:
                taken += await node.take(0, logprobs)
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


def test_a_slip_changes_one_character_to_another_of_its_sort() -> None:
    for seed in range(40):
        wrong = slip("a1b2", random.Random(seed))
        (change,) = [pair for pair in zip("a1b2", wrong, strict=True) if len(set(pair)) == 2]
        assert change[0].isdigit() == change[1].isdigit()


def settled(node: Node) -> bool:
    """Whether a node has heard the three offers, and decided about them."""
    status = node.status()
    return status["admitted"] == 3 and not status["pending"] and node.ready


async def lives(own: OwnTasks, library: Library, folder: Path, model: Path) -> list[list[Group]]:
    """What a node takes before and after its run is resumed, while the exchange still has everything."""
    hub, lives = MemorySwarm(), list[list[Group]]()
    config = Config(tasks=TASKS, swarm=SwarmConfig(external_groups=2))
    joined = Joined(hub.join(), own, Identity.fresh(), folder / "generator", config)
    await Generator(joined, library.services, RuleSolver("truth", 0), GeneratorPace(4, 0.01, 3)).run()
    identity = Identity.fresh()
    async with RewardService(RewardConfig()) as scorer:
        for _ in range(2):
            joined = Joined(hub.join(), own, identity, folder / "node", config)
            before = [group for life in lives for group in life]
            node = Node(joined, scorer, load_renderer(model), 256, known=partial(nullcontext, before))
            running = asyncio.ensure_future(node.run())
            await until(partial(settled, node))
            lives.append(await node.take(0, logprobs))
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
    assert all(group.external for group in before)
    assert not {group.id for group in before} & {group.id for group in after}


def test_a_model_behind_an_openai_url_answers() -> None:
    async def main(url: str, task: Task) -> None:
        async with ChatModel(url, "frozen") as model:
            first, *rest = await model.answers(task, 3)
        assert (first.text, first.complete) == ("3", True)
        assert rest == [first, first]

    with Library(TASKS, 0) as library, openai_server() as url:
        asyncio.run(main(url, library.services[0].draw(Split.TRAIN, 0)))


def test_a_model_without_a_name_is_the_only_one_that_its_server_lists() -> None:
    async def name(url: str) -> str:
        async with ChatModel(url) as model:
            return model.name

    with openai_server() as url:
        assert asyncio.run(name(url)) == "frozen"
    with openai_server(models=["a", "b"]) as url, pytest.raises(ConfigError, match="expected the name of one of a, b"):
        asyncio.run(name(url))


def test_a_model_that_refuses_the_first_question_ends_the_generator_with_its_sentence(tmp_path: Path) -> None:
    async def main(url: str, library: Library, own: OwnTasks) -> None:
        async with ChatModel(url, "frozen") as model:
            joined = Joined(MemorySwarm().join(), own, Identity.fresh(), tmp_path, Config(tasks=TASKS))
            await Generator(joined, library.services, model, GeneratorPace()).run()

    with Library(TASKS, 0) as library, openai_server(401) as url:
        own = OwnTasks(library.services)
        with pytest.raises(BaseExceptionGroup) as raised:
            asyncio.run(main(url, library, own))
        own.close()
    assert raised.group_contains(RequestRefused, match="HTTP 401")


def generator_of(answerer: Answerer, folder: Path, hub: MemorySwarm, pace: GeneratorPace) -> Generator:
    """One that shares questions of a file."""
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"say {c}", "answer": c}) for c in "abcdefghijkl"))
    task = TaskConfig(name="letters", service="jsonl", path=str(data), scorer="exact", eval_share=0.4)
    service = JsonlService(task, 0)
    joined = Joined(hub.join(), OwnTasks([service]), Identity.fresh(), folder, Config(tasks=[task]))
    return Generator(joined, [service], answerer, pace)


class Answers:
    """Says the truth `n` times, or what it is told to fail with."""

    kind = GeneratorKind.RULE
    name = "answers"

    def __init__(self, *, each: int | None = None, takes_s: float = 0.0) -> None:
        self._each, self._takes_s = each, takes_s
        self.failure: Exception | None = None
        self.asked: list[int] = []

    async def answers(self, task: Task, n: int) -> list[OfferedRollout]:
        self.asked.append(n)
        await asyncio.sleep(self._takes_s)
        if self.failure is not None:
            raise self.failure
        return [OfferedRollout(task.answer or "")] * (self._each or n)


def shared(hub: MemorySwarm) -> list[Offer]:
    """The offers in a hub."""
    ingress = IngressFilter("reef", "")
    found = [ingress.admit(frame, time.time()) for _, frame in hub.frames.values()]
    return [one.content for one in found if isinstance(one, VerifiedMessage) and isinstance(one.content, Offer)]


def test_a_generator_that_is_to_end_and_whose_model_cannot_be_reached_ends_with_the_reason(tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}/v1"

    async def main() -> None:
        async with ChatModel(nowhere, "frozen") as model:
            await generator_of(model, tmp_path, MemorySwarm(), GeneratorPace(2, 0.01, 3)).run()

    with pytest.raises(BaseExceptionGroup) as raised:
        asyncio.run(main())
    assert raised.group_contains(ShoalError, match=rf"no group could be shared, 5 in a row failed; .*{nowhere}")
    assert nowhere in json.loads((tmp_path / "status.json").read_text())["failure"]


def test_the_last_failure_is_in_the_status_until_a_group_is_shared_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        answerer, hub = Answers(), MemorySwarm()
        answerer.failure = EngineUnavailable("nobody\nis here")
        generator = generator_of(answerer, tmp_path, hub, GeneratorPace(2, 0.01))
        running = asyncio.ensure_future(generator.run())
        await until(lambda: generator.tally.unsent >= 2)
        assert generator.status()["failure"] == "nobody\nis here"
        answerer.failure = None
        await until(lambda: bool(generator.tally.shared))
        assert generator.status()["failure"] == ""
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with caplog.at_level(logging.WARNING, "shoal.swarm.generator"):
        asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == [r"no group was shared: 'nobody\nis here'"]


async def test_a_refusal_after_good_groups_ends_nothing(tmp_path: Path) -> None:
    answerer = Answers()
    generator = generator_of(answerer, tmp_path, MemorySwarm(), GeneratorPace(2, 0.01, 3))
    running = asyncio.ensure_future(generator.run())
    await until(lambda: bool(generator.tally.shared))
    answerer.failure = RequestRefused("too long")
    await until(lambda: generator.status()["failure"] == "too long")
    answerer.failure = None
    await running


async def test_each_group_is_of_a_question_drawn_anew(tmp_path: Path) -> None:
    hub = MemorySwarm()
    await generator_of(Answers(), tmp_path, hub, GeneratorPace(2, 0.001, 20)).run()
    assert len(found := shared(hub)) == 20
    assert len({offer.claim.question for offer in found}) > 1


async def test_the_loops_of_a_peer_have_names_where_a_standstill_lists_what_waits(tmp_path: Path) -> None:
    generator = generator_of(Answers(), tmp_path, MemorySwarm(), GeneratorPace(2, 0.01))
    running = asyncio.ensure_future(generator.run())
    await until(lambda: bool(generator.tally.shared))
    names = {line.partition(" waits in ")[0] for line in waits(asyncio.get_running_loop())}
    assert names > {"swarm: listening", "swarm: reporting", "generator: listening and reporting"}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("each", [None, 100])
def test_of_a_larger_group_as_many_answers_are_asked_for_and_shared_as_an_offer_holds(
    tmp_path: Path, each: int | None
) -> None:
    answerer, hub = Answers(each=each), MemorySwarm()

    async def main() -> None:
        async with asyncio.timeout(60):
            await generator_of(answerer, tmp_path, hub, GeneratorPace(100, 0.01, 1)).run()

    asyncio.run(main())
    assert [len(offer.rollouts) for offer in shared(hub)] == [MAX_ROLLOUTS]
    assert answerer.asked == [MAX_ROLLOUTS]


def test_answers_that_take_longer_than_the_pace_are_followed_by_the_next_question_at_once(tmp_path: Path) -> None:
    generator = generator_of(Answers(takes_s=0.02), tmp_path, MemorySwarm(), GeneratorPace(2, 0.01, 60))
    asyncio.run(asyncio.wait_for(generator.run(), 60 * RETRY_S))
    assert generator.tally.shared == 60


def test_a_generator_is_either_a_model_or_a_rule() -> None:
    config = parse({"tasks": [{"name": "gcd"}], "rollout": {"max_tokens": 9, "temperature": 0.5}})
    model = answerer_of(config, "http://h/v1", "m", "key", None)
    assert model == ChatModel("http://h/v1", "m", "key", max_tokens=9, temperature=0.5)
    for model_url, rule in ((None, None), ("http://h/v1", "truth")):
        with pytest.raises(ConfigError, match="expected either --model-url or --rule"):
            answerer_of(config, model_url, "m", "", rule)
