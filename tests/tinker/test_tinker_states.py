"""States of models on disk and their weights in the trainer are those of the same finished requests."""

import asyncio
import json
import re
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from fuzz_tinker import floats, gradients, proto
from rank_here import RankHere, nothing_pending
from shoal.errors import RunDirError
from shoal.tinker.app import TinkerApp
from shoal.tinker.bodies import encoded
from shoal.tinker.models_trainer import ServerSettings
from shoal.tinker.service import TinkerService
from shoal.tinker.store import SavedWeights, Store, owner_of
from shoal.trainer.messages import Adapter
from shoal.trainer.worker import TrainerProcess
from until import until

WAIT_S = 60
ADAM = json.dumps({"learning_rate": 1e-3}).encode()


@asynccontextmanager
async def trainers() -> AsyncIterator[TrainerProcess]:
    yield TrainerProcess([RankHere()])


async def test_a_step_whose_state_cannot_be_written_fails_and_leaves_the_weights_as_they_were(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    fields = gradients(weights=floats(1.0)) | {"model_id": "m", "seq_id": 1}
    shown, gradient = ("forward_backward", proto(fields | {"forward_only": True})), ("forward_backward", proto(fields))
    asked = [("create", b""), shown, gradient, ("optim_step", ADAM), shown, gradient, ("optim_step", ADAM), shown]
    (tmp_path / "states" / "m" / "4" / "model.safetensors").mkdir(parents=True)  # no file can be written there
    settings = ServerSettings({"tiny": tiny_model_dir}, tmp_path, engines=0)
    async with TinkerService(settings, trainers=trainers) as service:
        service.store.add_session("s", "owner")
        service.store.add_model("m", "s", "tiny", encoded(Adapter(2)), "", False)
        for number, (kind, body) in enumerate(asked):
            service.submit(f"m/{number}", "m", kind, body)
        await until(partial(nothing_pending, service.store), WAIT_S)
        found = [one for n in range(len(asked)) if (one := service.store.request(f"m/{n}")) is not None]
    assert [one.state for one in found] == ["done", "done", "done", "failed", *["done"] * 4]
    before, after_failure, after_step = (found[n].result for n in (1, 4, 7))
    assert before == after_failure != after_step


async def test_a_step_waits_for_one_request_of_another_model_however_many_that_one_has(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    steps: list[str] = []
    settings = ServerSettings({"tiny": tiny_model_dir}, tmp_path, engines=0)
    async with TinkerService(settings, lambda model, *_: steps.append(model), trainers=trainers) as service:
        for model, count in (("many", 6), ("one", 1)):
            service.store.add_session(model, model)
            service.store.add_model(model, model, "tiny", encoded(Adapter(2)), "", False)
            service.submit(f"{model}/0", model, "create", b"")
            for number in range(1, 1 + count):
                service.submit(f"{model}/{number}", model, "optim_step", ADAM)
        await until(partial(nothing_pending, service.store), WAIT_S)
    assert steps == ["many", "one", *["many"] * 5]


def pragma(store: Store, name: str, value: str = "") -> int:
    return int(store._db.execute(f"PRAGMA {name}{value}").fetchone()[0])


def test_what_a_client_is_told_survives_the_loss_of_power(tmp_path: Path) -> None:
    store = Store(tmp_path / "server.sqlite")
    assert pragma(store, "synchronous") == 2  # FULL: a commit is on the disk before it returns
    store.close()


@contextmanager
def full_disk(store: Store) -> Iterator[None]:
    """SQLite has no page left, and changes need one."""
    changes = ("INSERT ON sessions", "UPDATE ON requests", "DELETE ON checkpoints")
    store._db.execute("CREATE TABLE filler (bytes BLOB)")
    for number, change in enumerate(changes):
        grow = f"BEFORE {change} BEGIN INSERT INTO filler VALUES (zeroblob(1 << 20)); END"
        store._db.execute(f"CREATE TEMP TRIGGER full_{number} {grow}")
    pragma(store, "max_page_count", f"={pragma(store, 'page_count')}")
    yield
    pragma(store, "max_page_count", f"={1 << 30}")
    for number, _ in enumerate(changes):
        store._db.execute(f"DROP TRIGGER full_{number}")


async def answer_to_a_new_session(service: TinkerService) -> httpx.Response:
    http = httpx.ASGITransport(TinkerApp(service, ("key",)).app)
    async with httpx.AsyncClient(transport=http, headers={"X-API-Key": "key"}) as client:
        return await client.post("http://here/api/v1/create_session", json={"type": "create_session"})


async def test_a_full_disk_ends_requests_and_no_server(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ServerSettings({"tiny": tiny_model_dir}, tmp_path, engines=0)
    async with TinkerService(settings, trainers=trainers) as service:
        store = service.store
        store.add_session("s", owner_of("key"))
        store.add_model("m", "s", "tiny", encoded(Adapter(2)), "", False)
        service.submit("m/0", "m", "create", b"")
        await until(partial(nothing_pending, store), WAIT_S)
        service.submit("m/1", "m", "optim_step", ADAM)
        with full_disk(service.store):
            refused = await answer_to_a_new_session(service)
            assert refused.status_code == 507
            assert "free space" in refused.text
            await until(lambda: "is full" in capsys.readouterr().err, WAIT_S)
            assert not nothing_pending(store)
        await until(partial(nothing_pending, store), WAIT_S)
        service.submit("m/2", "m", "optim_step", ADAM)
        await until(partial(nothing_pending, store), WAIT_S)
        found = [one.state for n in range(3) if (one := store.request(f"m/{n}")) is not None]
    assert found == ["done", "failed", "done"]


async def test_a_checkpoint_whose_time_is_over_makes_room_on_a_full_disk(tiny_model_dir: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    async with TinkerService(
        ServerSettings({"tiny": tiny_model_dir}, tmp_path, engines=0), trainers=trainers
    ) as service:
        service.store.add_checkpoint(SavedWeights("tinker://m/weights/a", "m", "training", str(saved), 0, 1, 0, 1))
        with full_disk(service.store):
            await until(lambda: not saved.exists(), WAIT_S)


@pytest.mark.parametrize("kind", ["optim_step", "sample"])
async def test_a_store_that_no_space_mends_ends_the_server_with_a_sentence(
    kind: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    why = "server.sqlite: expected a database that can be written, got: attempt to write a readonly database"
    with pytest.RaisesGroup(pytest.RaisesExc(RunDirError, match=re.escape(why))):
        async with TinkerService(
            ServerSettings({"tiny": tiny_model_dir}, tmp_path, engines=0), trainers=trainers
        ) as service:
            service.store.add_session("s", owner_of("key"))
            service.store.add_model("m", "s", "tiny", encoded(Adapter(2)), "", False)
            service.submit("m/0", "m", "create", b"")
            await until(partial(nothing_pending, service.store), WAIT_S)
            service.submit("m/1", "m", kind, ADAM)
            service.store._db.execute("PRAGMA query_only = ON")
            refused = await answer_to_a_new_session(service)
            assert (refused.status_code, "free space" in refused.text) == (500, False)
            await asyncio.Event().wait()


def test_a_transaction_that_finds_no_room_leaves_the_store_usable(tmp_path: Path) -> None:
    store = Store(tmp_path / "server.sqlite")
    pragma(store, "max_page_count", f"={pragma(store, 'page_count')}")
    with pytest.raises(sqlite3.OperationalError, match="full"), store.together():
        store.add_request("m/1", "m", "forward_backward", bytes(1 << 20))
    with store.together():
        store.add_session("s", "owner")
    assert store.request("m/1") is None
    store.close()
