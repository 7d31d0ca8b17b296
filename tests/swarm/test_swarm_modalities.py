"""Questions about images reach nodes that read them, in a sandbox; other nodes ignore exactly those."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.hostile.images import images
from examples.modalities.glyphs import Grids, Pictures, asked, drawn, grid_of, png_of
from shoal import wire
from shoal.config import Config, RewardConfig, SwarmConfig, TaskConfig
from shoal.errors import ExchangeUnavailable
from shoal.interfaces import Environment
from shoal.model.renderer_loading import load_renderer
from shoal.net.identity import Identity
from shoal.reward.service import RewardService
from shoal.swarm.answerers import RuleSolver
from shoal.swarm.generator import Generator, GeneratorPace
from shoal.swarm.node import Node
from shoal.swarm.peer import Joined
from shoal.swarm.trust.attachments import AttachmentReader
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.trust.limits import USUAL, QuestionLimits
from shoal.swarm.trust.python_tasks import PythonTasks
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.envelope import Kind, Signer
from shoal.swarm.wire.exchange import MAX_ATTACHMENT_BYTES, MemoryExchange, MemorySwarm
from shoal.swarm.wire.nats import NatsExchange
from shoal.swarm.wire.offer import Attached, Claim, GeneratorKind, Offer, OfferedRollout
from shoal.swarm.wire.options import NatsOptions
from shoal.swarm.wire.server import NatsServer, ServerOptions
from shoal.tasks.jsonl import JsonlService
from shoal.tasks.sdk import definition_at
from shoal.types import Split, Task
from until import until

CONFIG = Config(tasks=[TaskConfig(name="glyphs")], swarm=SwarmConfig(external_groups=4, take="uniform"))


class Watched(MemoryExchange):
    """An exchange that notes what was fetched."""

    def __init__(self, swarm: MemorySwarm) -> None:
        super().__init__(swarm)
        self.fetched: list[str] = []

    async def fetch(self, digest: str, most_bytes: int) -> bytes | None:
        self.fetched.append(digest)
        return await super().fetch(digest, most_bytes)


@asynccontextmanager
async def joined(
    exchange: MemoryExchange, services: Sequence[Environment], folder: Path, limits: QuestionLimits = USUAL
) -> AsyncIterator[Joined]:
    identity = Identity.fresh()
    async with PythonTasks(services, limits) as python:
        own = OwnTasks(services, None, python, AttachmentReader(services, python, exchange, limits), limits)
        yield Joined(exchange, own, identity, folder, CONFIG)
        own.close()


async def logprobs(rows: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[-1.0] * (len(row) - 1) for row in rows]


def test_a_reader_learns_from_pictures_of_a_rule_and_a_text_node_ignores_exactly_those(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    words = tmp_path / "words.jsonl"
    words.write_text("\n".join(f'{{"prompt": "say {c}", "answer": "{c}"}}' for c in "abcdefghijklmnop"))
    letters = JsonlService(TaskConfig(name="words", service="jsonl", path=str(words), scorer="exact"), 0)

    async def main() -> None:
        hub = MemorySwarm()
        reading, texting = Watched(hub), Watched(hub)
        async with (
            RewardService(RewardConfig()) as scorer,
            joined(hub.join(), [Pictures], tmp_path / "rule") as rule,
            joined(hub.join(), [letters], tmp_path / "words") as other,
            joined(reading, [Grids], tmp_path / "reader") as reader,
            joined(texting, [letters], tmp_path / "text") as text,
        ):
            # The sandbox starts now: its start is no time that an offer takes.
            assert isinstance(await reader.own.task(await rule.own.claim(Pictures.draw(Split.TRAIN, 99))), Task)
            pace = GeneratorPace(rollouts=4, every_s=0.01, groups=6)
            drawing = Generator(rule, [Pictures], RuleSolver("truth", 0), pace)
            spelling = Generator(other, [letters], RuleSolver("truth", 0), pace)
            nodes = [Node(one, scorer, load_renderer(tiny_model_dir), 1024) for one in (reader, text)]
            starts = [*(node.run() for node in nodes), drawing.run(), spelling.run()]
            running = [asyncio.ensure_future(one) for one in starts]
            await asyncio.gather(*running[2:])
            pictured, texted = nodes
            await until(lambda: pictured.ready >= 2 and texted.ready >= 2, 150)
            await until(lambda: texted.ingress.refused[Reason.OTHER_MODALITY] == 6, 150)
            groups = await pictured.take(0, logprobs)
            words_groups = await texted.take(0, logprobs)
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        assert groups
        for group in groups:
            assert set(group.task.messages[-1].content) == set(".#\n")
            assert {rollout.reward.value for rollout in group.rollouts} == {0.0, 1.0}
            right = {one.messages[-1].content for one in group.rollouts if one.reward.value}
            assert right == {group.task.answer}
        assert {group.task.service for group in words_groups} == {"words"}
        assert texting.fetched == []
        assert len(set(reading.fetched)) >= 2

    asyncio.run(main())


def test_a_picture_reads_back() -> None:
    import random

    grid, _ = drawn(random.Random(3))
    assert grid_of(png_of(grid)) == grid


@pytest.mark.parametrize("name", images())
def test_a_hostile_image_is_no_picture(name: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        grid_of(images()[name])


CARELESS = """
import io
from PIL import Image
from shoal.tasks.sdk import Question, environment


@environment("glyphs")
class careless:
    media = ("image/png", "text/html")

    def draw(self, rng):
        return Question(f"{rng.random()}", "1", scorer="exact")

    def read(self, question, attachments):
        Image.MAX_IMAGE_PIXELS = None
        with Image.open(io.BytesIO(attachments[0])) as image:
            image.load()
            return Question(f"{image.size} {list(image.getdata())[:64]}")
"""


def test_hostile_images_cost_even_a_careless_reader_nothing_but_time(tmp_path: Path) -> None:
    """The reader opens whatever it gets, with every guard off: its sandbox bounds what that costs."""
    from shoal.tasks.sdk import definition_at

    (tmp_path / "careless.py").write_text(CARELESS)
    task = definition_at(f"{tmp_path / 'careless.py'}:careless")

    async def main() -> None:
        hub = MemorySwarm()
        limits = QuestionLimits(draw_s=3.0, attachment_bytes=200_000)
        async with joined(hub.join(), [task], tmp_path, limits) as node:
            found = {}
            for name, data in images().items():
                claim = await attach(hub, data)
                found[name] = await node.own.task(claim)
            png = png_of(["." * 8] * 8)
            for claim, reason in (
                (await attach(hub, png, media_type="image/gif"), Reason.OTHER_MODALITY),
                (await attach(hub, png, modality="smell"), None),
                (await attach(hub, png, modality="text"), Reason.OTHER_MODALITY),
                (await attach(hub, png, size=300_000), Reason.OUT_OF_BOUNDS),
                (await attach(hub, png, size=10), Reason.NOT_SENT),
                (await attach(hub, png_of(["#" * 8] * 8), kept=png), Reason.NOT_SENT),
                (await attach(hub, png, truth=None), Reason.UNKNOWN_TASK),
                (await attach(hub, png), None),
            ):
                decided = await node.own.task(claim)
                assert (decided if isinstance(decided, Reason) else None) is reason, claim
        called_png = [name for name in found if name.endswith("called png")]
        assert len(called_png) == 4
        assert all(found[name] is Reason.NOT_SENT for name in called_png)
        assert isinstance(found["filters"], Task)  # a right PNG, of another kind
        for name in ("bomb in many dots", "largest size", "cut in its head", "noise", "wrong checksum"):
            assert found[name] in (Reason.UNREADABLE, Reason.TIMED_OUT), (name, found[name])

    asyncio.run(main())


async def attach(
    hub: MemorySwarm,
    data: bytes,
    *,
    kept: bytes | None = None,
    size: int | None = None,
    media_type: str = "image/png",
    modality: str = "image",
    truth: str | None = "1",
) -> Claim:
    """A claim about an image that the swarm keeps."""
    digest = hashlib.sha256(data).hexdigest()
    hub.attachments[digest] = kept or data
    attached = Attached(digest, media_type, size or len(data))
    return Claim("glyphs", "Which digit?", truth, modality=modality, attachments=(attached,))


def test_answers_of_another_modality_are_counted_and_never_looked_at(tmp_path: Path, tiny_model_dir: Path) -> None:
    async def main() -> None:
        hub = MemorySwarm()
        watched, peer = Watched(hub), Identity.fresh()
        async with RewardService(RewardConfig()) as scorer, joined(watched, [Grids], tmp_path) as one:
            node = Node(one, scorer, load_renderer(tiny_model_dir), 1024)
            running = asyncio.ensure_future(node.run())
            claim = await attach(hub, png_of(["." * 8] * 8))
            said = (OfferedRollout("1"), OfferedRollout("2"))
            offer = Offer(claim, said, GeneratorKind.RULE, "m", time.time(), answers="audio")
            frame = Signer(peer, "reef", session=1).frame(Kind.OFFER, wire.encode(offer), time.time())
            await hub.join().publish(Kind.OFFER, peer.peer_id, frame)
            await until(lambda: node.ingress.refused[Reason.OTHER_MODALITY] == 1)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert watched.fetched == []

    asyncio.run(main())


def test_a_drawn_picture_is_sent_by_its_hash(tmp_path: Path) -> None:
    async def main() -> None:
        hub = MemorySwarm()
        async with joined(hub.join(), [Pictures], tmp_path) as rule:
            task = Pictures.draw(Split.TRAIN, 0)
            claim = await rule.own.claim(task)
        (attached,) = claim.attachments
        data = hub.attachments[attached.digest]
        assert hashlib.sha256(data).hexdigest() == attached.digest
        assert (claim.modality, attached.media_type, attached.size_bytes) == ("image", "image/png", len(data))
        assert len(asked(grid_of(data))) == 8 * 9 - 1

    asyncio.run(main())


def test_attachments_pass_through_a_real_server_beside_the_frames(tmp_path: Path) -> None:
    async def main() -> None:
        async with NatsServer(ServerOptions(tmp_path)) as server:
            options = NatsOptions((server.url,), "reef")
            async with NatsExchange(options) as one, NatsExchange(options) as other:
                with pytest.raises(ExchangeUnavailable):
                    await one.fetch("0" * 64, 100)
                reading = [asyncio.ensure_future(exchange.receive(10)) for exchange in (one, other)]
                await until(lambda: one.connected and other.connected)
                data = png_of(["#" * 8] * 8)
                digest = hashlib.sha256(data).hexdigest()
                assert await other.fetch(digest, 10_000) is None
                await one.attach(digest, b"an earlier one")
                await one.attach(digest, data)
                assert await other.fetch(digest, 10_000) == data
                assert await other.fetch(digest, len(data) - 1) is None
                with pytest.raises(ExchangeUnavailable, match="at most"):
                    await one.attach(digest, bytes(MAX_ATTACHMENT_BYTES + 1))
                await one.publish("offer", "a", b"a frame")
                assert await asyncio.gather(*reading) == [[b"a frame"], [b"a frame"]]  # and no attachment

    asyncio.run(main())


FUNCTION = {"name": "function", "path": "my_rewards:mine"}
JUDGE = {"name": "judge", "url": "http://127.0.0.1:1/v1", "model": "m", "rubric": "right?"}
READS = """
from shoal.tasks.sdk import Question, environment

@environment("glyphs")
class reads:
    media = ("image/png",)

    def draw(self, rng):
        return Question(f"{rng.random()}", "1", scorer="exact")

    def read(self, question, attachments):
        BODY
"""


def decided(tmp_path: Path, body: str, question: str) -> Task | Reason:
    """Decision of a node about a picture, by a task whose `read` has this body."""
    (tmp_path / "reads.py").write_text(READS.replace("BODY", body))
    task = definition_at(f"{tmp_path / 'reads.py'}:reads")

    async def main() -> Task | Reason:
        hub = MemorySwarm()
        async with joined(hub.join(), [task], tmp_path) as node:
            claim = replace(await attach(hub, png_of(["." * 8] * 8)), question=question)
            return await node.own.task(claim)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("scorer", "taken"),
    [
        ("exact", True),
        (FUNCTION, False),
        (JUDGE, False),
        ({"name": "weighted", "parts": [{"scorer": "exact"}, {"scorer": FUNCTION}]}, False),
    ],
)
def test_a_picture_is_a_question_only_if_a_confined_checker_scores_it(
    tmp_path: Path, scorer: object, *, taken: bool
) -> None:
    found = decided(tmp_path, f'return Question("a picture", scorer={scorer!r})', "what is it?")
    assert isinstance(found, Task) if taken else found is Reason.UNKNOWN_TASK


@pytest.mark.parametrize("forged", ['service="another"', 'id="another/1"', 'info="["', 'info="7"'])
def test_a_reader_that_a_peer_took_over_names_no_other_task_and_ends_no_node(tmp_path: Path, forged: str) -> None:
    """`eval` stands for a decoder with a hole: a peer's code runs in the sandbox, and its reply is not trusted."""
    attack = (
        "(lambda sdk, replace: [setattr(sdk, 'task_of', lambda self, question, id_, of=sdk.task_of: "
        f"replace(of(self, question, id_), {forged})), 'a picture'][1])"
        "(__import__('shoal.tasks.sdk').tasks.sdk.Definition, __import__('dataclasses').replace)"
    )
    assert decided(tmp_path, "return Question(str(eval(question)))", attack) is Reason.UNREADABLE
