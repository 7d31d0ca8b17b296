"""A training run in a swarm: what peers offer is verified, re-scored, encoded, logged and trained; without them it is
the run that it would have been."""

import asyncio
import hashlib
import json
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adversary import ExactScorer
from benchmarks.memory_swarm import MemorySwarm
from command import shoal
from shoal import wire
from shoal.config import load, parse
from shoal.errors import ConfigError
from shoal.experience.audit import audit
from shoal.experience.log import newest_groups, snapshot
from shoal.net.identity import Identity
from shoal.run.demo_model.architecture import Shape, save, untrained
from shoal.run.prepare import prepare
from shoal.run.training import run_training, swarm_node, train
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.trust.contents import texts_of
from shoal.swarm.wire.envelope import Signer
from shoal.swarm.wire.invitation import NatsOptions
from shoal.swarm.wire.nats import NatsExchange
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout
from shoal.swarm.wire.server import NatsServer, ServerOptions
from shoal.types import Split
from until import until

CONFIG = """
run_dir = "run"
[[tasks]]
name = "letters"
service = "jsonl"
path = "{data}"
scorer = "contains"
[model]
path = "{model}"
[rollout]
group_size = 4
max_tokens = 8
[train]
steps = 10
groups_per_step = 1
lr = 1e-3
[asynchrony]
max_staleness = 0
[eval]
every_steps = 0
questions = 2
[checkpoint]
every_steps = 4
"""
QUESTIONS = [(f"say {letter}{n}", letter) for n in range(80) for letter in "abcdefgh"]


@pytest.fixture
def config(tmp_path: Path, tiny_model_dir: Path) -> Path:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": q, "answer": a}) for q, a in QUESTIONS))
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(data=data, model=tiny_model_dir))
    return path


def trained(config: Path, *options: str) -> dict[str, object]:
    done = shoal("train", str(config), "--json", *options, cwd=config.parent)
    assert done.returncode == 0, done.stderr
    outcome: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def steps_of(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def weights_of(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def offer(question: str, truth: str, *texts: str) -> bytes:
    rollouts = tuple(OfferedRollout(text) for text in texts)
    return wire.encode(Offer(Claim("letters", question, truth), rollouts, GeneratorKind.RULE, "rule", time.time()))


def with_peer(
    folder: Path, payloads: Sequence[bytes], body: Callable[[str], None], identity: Identity | None = None
) -> int:
    """Runs `body` while a peer gives payloads to a server, again and again; gives how many offers the peer received."""
    heard, urls, done = 0, queue.Queue[str](), threading.Event()

    async def main() -> None:
        me = identity or Identity.fresh()
        seal = Signer(me, "reef", session=int(time.time() * 1000))
        async with (
            NatsServer(ServerOptions(folder)) as server,
            NatsExchange(NatsOptions((server.url,), "reef")) as exchange,
        ):

            async def hear() -> None:
                nonlocal heard
                while True:
                    frames = await exchange.receive(100)
                    heard += sum(me.public_key not in frame for frame in frames)

            async def say() -> None:
                await until(lambda: exchange.connected)
                while True:
                    for payload in payloads:
                        await exchange.publish(me.peer_id, seal.frame(payload, time.time()))
                        await asyncio.sleep(0.02)

            tasks = [asyncio.create_task(hear()), asyncio.create_task(say())]
            urls.put(server.url)
            await asyncio.to_thread(done.wait)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    with ThreadPoolExecutor(1) as peer:
        served = peer.submit(asyncio.run, main())
        try:
            body(urls.get(timeout=60))
        finally:
            done.set()
        served.result()
    return heard


GOOD = [offer(question, answer, answer, "zz", answer + "!", "no") for question, answer in QUESTIONS]


def test_a_run_trains_on_what_peers_offer_besides_its_own_and_its_log_replays(config: Path) -> None:
    run = config.parent / "run"

    def body(url: str) -> None:
        options = (f'--swarm.servers=["{url}"]', "--train.groups_per_step=2")
        trained(config, *options, "--swarm.external_groups=2")
        # The last checkpoint is gone: the steps after the one before are trained again from the log.
        shutil.rmtree(max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:])))
        trained(config, *options, "--swarm.external_groups=2", "--swarm.reuse=4", "--resume", "--train.steps=24")

    heard = with_peer(config.parent / "server", GOOD, body)
    assert heard >= 10  # the run shared its own groups as well
    report = audit(run)
    assert report.ok, report.sentences()
    steps = steps_of(run)
    assert len(steps) == 24
    external = sum(step["external"] for step in steps)
    assert external >= 2
    assert report.consumed == 24 * 2 + external
    assert all(step["external"] + step["external_missing"] == 2 for step in steps)
    assert any(step.get("reward_external", 0) == pytest.approx(0.5) for step in steps)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert not any(line.get("name") == "replay_not_exact" for line in events)
    status = json.loads((run / "swarm" / "status.json").read_text())
    assert len(status["peers"]) == 1
    assert status["banned"] == []


def test_a_resumed_node_knows_the_groups_of_its_log(config: Path) -> None:
    trained(config, "--train.steps=1")
    url = "nats://127.0.0.1:9"  # nobody listens there

    async def main() -> None:
        with (
            prepare(load(config, [f"run_dir={config.parent / 'run'}", f'swarm.servers=["{url}"]'])) as prepared,
            snapshot(config.parent / "run") as connection,
        ):
            (group,) = newest_groups(connection, 1, 0)
            async with swarm_node(prepared, ExactScorer(), MemorySwarm().join()) as node:
                assert node is not None

                def is_known() -> bool:
                    return node.verification.contents.repeats(group.task, texts_of(group), "a stranger", 0.0)

                assert not is_known()
                running = asyncio.ensure_future(node.run())
                await until(is_known)
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def test_with_no_external_groups_a_member_of_a_swarm_trains_to_the_same_bits_as_a_node_alone(config: Path) -> None:
    trained(config, "--run_dir=alone")
    with_peer(
        config.parent / "server",
        GOOD,
        lambda url: trained(config, "--run_dir=member", f'--swarm.servers=["{url}"]') and None,
    )
    assert weights_of(config.parent / "alone") == weights_of(config.parent / "member")
    assert sum(step["offers_admitted"] for step in steps_of(config.parent / "member")) > 0


def test_a_swarm_whose_servers_are_all_away_leaves_the_node_alone(config: Path) -> None:
    outcome = trained(config, '--swarm.servers=["nats://127.0.0.1:9"]', "--swarm.external_groups=3", "--train.steps=4")
    assert outcome["steps"] == 4
    assert sum(step["external_missing"] for step in steps_of(config.parent / "run")) == 12
    assert audit(config.parent / "run").ok


def test_a_run_takes_groups_of_a_swarm_in_memory(config: Path) -> None:
    hub, peer, run = MemorySwarm(), Identity.fresh(), config.parent / "run"
    settings = load(config, [f'run_dir="{run}"', "train.steps=1", "swarm.external_groups=1", "swarm.wait_s=60"])
    signer = Signer(peer, settings.swarm.name, session=1)
    for payload in GOOD[:4]:
        hub.put(peer.peer_id, signer.frame(payload, time.time()))
    with prepare(settings) as prepared:
        asyncio.run(train(prepared, exchange=hub.join()))
    assert [step["external"] for step in steps_of(run)] == [1]


def test_a_hanging_answer_of_a_peer_takes_the_processor_time_of_peers_and_not_that_of_own_answers(
    tmp_path: Path,
) -> None:
    save(untrained(Shape(width=32, heads=2, feed_forward=64, context=128), 0), tmp_path / "tiny")
    hub, peer, run = MemorySwarm(), Identity.fresh(), tmp_path / "run"
    settings = parse(
        {
            "run_dir": str(run),
            "model": {"path": str(tmp_path / "tiny")},
            "tasks": [{"name": "countdown", "rewrite": [[r"(?s)\n.*$", ""]]}],
            "rollout": {"group_size": 2, "max_tokens": 16},
            "train": {"steps": 1, "groups_per_step": 1},
            "eval": {"every_steps": 0, "questions": 1},
            "reward": {"timeout_s": 3600},
            "swarm": {"external_groups": 1, "wait_s": 30, "round_offers": 1},
        }
    )
    with prepare(settings) as prepared:
        own = OwnTasks(prepared.environments.values())
        claim = asyncio.run(own.claim(prepared.environments["countdown"].draw(Split.TRAIN, 1)))
        own.close()
        made = Offer(claim, (OfferedRollout("9**9**9**9**9"),) * 2, GeneratorKind.RULE, "x", time.time())
        frame = Signer(peer, settings.swarm.name, session=1).frame(wire.encode(made), time.time())
        hub.put(peer.peer_id, frame)
        asyncio.run(train(prepared, exchange=hub.join()))
    assert json.loads((run / "swarm" / "status.json").read_text())["refused"]["no verdict in time"] == 1


@pytest.mark.parametrize(
    ("swarm", "sentence"),
    [
        ({"external_groups": 3}, "swarm.external_groups: peers' groups need swarm.servers"),
        ({"servers": ["localhost"]}, "swarm.servers: expected nats://HOST:PORT"),
        ({"share": "some"}, "swarm.share: expected one of"),
        ({"servers": ["nats://h"], "name": "a.b"}, "swarm.name: expected letters"),
    ],
)
def test_settings_that_no_swarm_can_fulfil_are_a_sentence_before_anything_starts(
    swarm: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_training(parse({"tasks": [{"name": "gcd"}], "swarm": swarm}))


def test_a_preset_that_wants_peers_is_named_where_no_server_is_and_so_is_the_way_to_train_alone() -> None:
    settings = {"preset": "sapo", "tasks": [{"name": "gcd"}]}
    said = 'swarm.external_groups: preset = "sapo" sets 4; peers\' groups need swarm.servers .* to 0 to train alone'
    with pytest.raises(ConfigError, match=said):
        run_training(parse(settings))
