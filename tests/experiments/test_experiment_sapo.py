"""The figures of `make sapo` come from the runs that are there, and a cell that fails ends nothing but itself."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from pydantic import JsonValue

from experiments.sapo.__main__ import HERE, main
from experiments.sapo.control import Misfits
from experiments.sapo.node import Scale, node_config, run_cell
from experiments.sapo_stacked.questions import SETTINGS
from shoal import wire
from shoal.config import parse
from shoal.errors import ConfigError
from shoal.net.identity import Identity
from shoal.swarm.wire.envelope import Signer, is_genuine, opened, payload_of
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout
from shoal.swarm.wire.server import NatsServer, ServerOptions
from until import until


def test_tables_and_figures_come_from_runs_whose_logs_all_passed_the_audit(tmp_path: Path) -> None:
    shutil.copyfile(HERE / "results" / "runs.jsonl", tmp_path / "runs.jsonl")
    main(["--cells", "0", "--results", str(tmp_path)])
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert {run["audits_clean"] for run in runs} == {8}
    assert {len(run["rewards"]) for run in runs} == {40}
    table = (tmp_path / "results.md").read_text()
    assert all(f"| {cell} |" in table for cell in {run["key"].rpartition(":")[0].replace(":", " ") for run in runs})
    assert (tmp_path / "figure1.png").stat().st_size > 1000


def test_a_cell_that_fails_is_named_and_is_in_no_table(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"failed: rarest:0/1:0"):
        main(["--quick", "--only", "rarest:0/1:0", "--results", str(tmp_path)])
    assert ":0/1" not in (tmp_path / "results.md").read_text()
    assert not (tmp_path / "runs.jsonl").exists()


async def collected(exchange: Misfits, count: int) -> list[bytes]:
    """The first `count` frames."""
    frames: list[bytes] = []
    while len(frames) < count:
        frames += await exchange.receive(count)
    return frames


def test_shuffled_answers_come_with_another_question_under_a_signature_that_holds(tmp_path: Path) -> None:
    peers = [Identity.fresh() for _ in range(2)]
    settings: dict[str, JsonValue] = {"run_dir": str(tmp_path / "run"), "tasks": [{"name": "gcd"}]}

    async def received() -> list[bytes]:
        async with NatsServer(ServerOptions(tmp_path / "server")) as server:
            config = parse({**settings, "swarm": {"servers": [server.url]}})
            async with Misfits(config) as exchange, asyncio.timeout(120), asyncio.TaskGroup() as tasks:
                hearing = tasks.create_task(collected(exchange, 3))
                await until(lambda: exchange.connected)
                own = Identity.load(tmp_path / "run" / "swarm" / "identity.pem")
                for author, text in zip([own, *peers], "012", strict=True):
                    claim = Claim("gcd", f"question {text}", text)
                    payload = wire.encode(Offer(claim, (OfferedRollout(text),), GeneratorKind.TRAINING, "m", 1.0))
                    frame = Signer(author, config.swarm.name, 1).frame(payload, 1.0)
                    await exchange.publish(author.peer_id, frame)
        return hearing.result()

    envelopes = {frame: opened(frame) for frame in asyncio.run(received())}
    assert all(is_genuine(frame, envelope) for frame, envelope in envelopes.items())
    offers = [wire.decode(payload_of(envelope), Offer) for envelope in envelopes.values()]
    assert [(one.claim.truth, one.rollouts[0].text) for one in offers] == [("0", "0"), ("1", "2"), ("2", "1")]


def test_each_node_has_an_order_of_the_specialties_where_the_control_says_so(tmp_path: Path) -> None:
    plain, first, other, again = (
        [task.name for task in node_config(tmp_path, tmp_path, cell, seed, Scale(), "nats://127.0.0.1:9").tasks]
        for cell, seed in (("4/4", 1), ("4/4-order", 1), ("4/4-order", 2), ("4/4-order", 1))
    )
    assert plain == list(SETTINGS)
    assert first == again
    assert len({*map(tuple, (plain, first, other))}) == 3
    assert sorted(first) == sorted(other) == sorted(plain)


def test_a_control_of_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="same, shuffled, order"):
        asyncio.run(run_cell(tmp_path, tmp_path, "4/4-shufled", 0, Scale()))
