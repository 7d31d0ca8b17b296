"""The person's page in a real browser, before a real swarm: asked, answered, offered, trained on."""

import asyncio
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from browser import Page, browser_path, chromium
from shoal import wire
from shoal.experience.log import FILE
from shoal.net.identity import Identity
from shoal.swarm.trust.ingress import IngressFilter, VerifiedMessage
from shoal.swarm.wire.envelope import Signer
from shoal.swarm.wire.invitation import NatsOptions
from shoal.swarm.wire.nats import NatsExchange
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout
from shoal.swarm.wire.server import NatsServer, ServerOptions
from until import until

SHOAL = str(Path(sys.executable).with_name("shoal"))
CONFIG = """
run_dir = "run"
[[tasks]]
name = "letters"
service = "jsonl"
path = "{data}"
scorer = "exact"
[model]
path = "{model}"
[rollout]
group_size = 4
max_tokens = 8
[train]
steps = 1
groups_per_step = 1
[asynchrony]
max_staleness = 0
[eval]
every_steps = 0
questions = 2
[swarm]
external_groups = 1
wait_s = 60
"""
EVIL = "<img src=x onerror=\"document.title='owned'\"></pre><script>document.title='owned'</script>"
QUESTIONS = {f"say {message}{n}": message for message in "abcdefgh" for n in range(4)}


async def received(url: str, peer: str) -> Offer:
    """The first offer of a peer."""
    ingress = IngressFilter("reef", "")
    async with NatsExchange(NatsOptions([url], "reef")) as exchange, asyncio.timeout(60):
        while True:
            for frame in await exchange.receive(256):
                message = ingress.admit(frame, time.time())
                if isinstance(message, VerifiedMessage) and message.peer_id == peer:
                    return message.content


@pytest.fixture
def config(tmp_path: Path, tiny_model_dir: Path) -> Path:
    browser_path()
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": q, "answer": a}) for q, a in QUESTIONS.items()))
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(data=data, model=tiny_model_dir))
    return path


@asynccontextmanager
async def node(config: Path, server: str, *options: str) -> AsyncIterator[tuple[str, str]]:
    """URL and peer id of a desk as a user starts it."""
    command = [SHOAL, "swarm", "desk", str(config), "--port", "0", f'--swarm.servers=["{server}"]', *options]
    process = await asyncio.create_subprocess_exec(*command, cwd=config.parent, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            url, peer = [(await process.stdout.readline()).decode().strip() for _ in range(2)]
        yield url, peer.split()[-1]
    finally:
        process.terminate()
        await process.wait()


async def asked(page: Page) -> str:
    """The question on the page, once it is there."""
    await page.until("!document.getElementById('send').disabled")
    question: str = await page.value("document.getElementById('question').textContent")
    return question


async def outcome(page: Page, verdict: str) -> None:
    shown = "!document.getElementById('verdict').hidden"  # and not what is left of the question before
    await page.until(f"{shown} && document.getElementById('outcome').textContent.startsWith('Verdict: {verdict}')")


async def trained(config: Path, server: str) -> list[str]:
    """The ids of the groups that a run consumed."""
    command = [SHOAL, "train", str(config), "--json", f'--swarm.servers=["{server}"]']
    process = await asyncio.create_subprocess_exec(*command, cwd=config.parent, stdout=subprocess.DEVNULL)
    assert await process.wait() == 0
    with sqlite3.connect(config.parent / "run" / FILE) as log:
        rows = log.execute("SELECT group_id FROM groups JOIN consumed USING(finished_seq)").fetchall()
    return [group_id for (group_id,) in rows]


async def test_a_question_answered_in_a_browser_becomes_an_offer_and_a_node_trains_on_it(config: Path) -> None:
    async with (
        NatsServer(ServerOptions(config.parent / "server")) as server,
        node(config, server.url, "--wait-s", "0") as (url, peer),
        chromium() as page,
    ):
        await page.goto(url)
        question = await asked(page)
        right = QUESTIONS[question]
        assert await page.value("document.documentElement.scrollWidth") <= 360
        await page.value("document.getElementById('answer').focus()")
        await page.type("z")
        await page.press("Enter", ctrl=True)
        await outcome(page, "not right")
        await page.type(right)  # the wrong one is selected, so that this takes its place
        await page.press("Tab")
        await page.press("Enter")  # on the button
        await outcome(page, "right")
        await page.until(
            "document.getElementById('shared').textContent.startsWith('The answers to this question are offered')"
        )
        (config.parent / "page.png").write_bytes(await page.screenshot())
        offer = await received(server.url, peer)
        assert (offer.claim.question, len(offer.rollouts), offer.generator) == (question, 2, "person")
        await page.press("Enter")  # the focus went on to the button for another question
        assert await asked(page) != question
        assert page.complaints == []
        consumed = await trained(config, server.url)
        assert any(group_id.startswith(f"{peer}/") for group_id in consumed), consumed


async def offered(server: str, question: str) -> None:
    """A peer offers answers with everything in them that a page could stumble over."""
    identity = Identity.fresh()
    seal = Signer(identity, "reef", session=int(time.time() * 1000))
    rollouts = (OfferedRollout(EVIL), OfferedRollout(QUESTIONS[question]))
    content = Offer(Claim("letters", question, QUESTIONS[question]), rollouts, GeneratorKind.RULE, EVIL, time.time())
    async with NatsExchange(NatsOptions((server,), "reef")) as exchange:
        receiving = asyncio.create_task(exchange.receive(1))
        await until(lambda: exchange.connected)
        frame = seal.frame(wire.encode(content), time.time())
        await exchange.publish(identity.peer_id, frame)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)


async def test_what_peers_wrote_is_shown_as_text_to_those_who_have_answered(config: Path) -> None:
    async with NatsServer(ServerOptions(config.parent / "server")) as server, node(config, server.url) as (url, _):
        # Half of the questions are peers'; more than enough offers for one of them to be asked soon.
        for question in list(QUESTIONS)[::4]:
            await offered(server.url, question)
        async with chromium(width=1200, height=900) as page:
            await page.goto(url)
            for _ in range(5):  # more would be over a visitor's rate
                question = await asked(page)
                await page.value("document.getElementById('answer').focus()")
                await page.type(QUESTIONS[question])
                await page.press("Enter", ctrl=True)
                await outcome(page, "right")
                shown = await page.value("document.getElementById('list').textContent")
                if shown.count(EVIL) == 3:  # an answer, and the model's name at two that were weighed by now
                    break
                await page.press("Enter")
                await page.until("document.getElementById('verdict').hidden")  # another one comes
            assert shown.count(EVIL) == 3
            assert "not right" in shown
            assert await page.value("document.querySelectorAll('img, li script').length") == 0
            assert await page.value("document.title") == "Answer a question - Shoal"
            (config.parent / "others.png").write_bytes(await page.screenshot())
            assert page.complaints == []
