"""Whatever a stored request holds or raises is the error of its own future, now and after every restart."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import httpx
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from fuzz_attack import mutated
from fuzz_tinker import POLICY, POSTS, floats, gradients, proto
from rank_here import RankHere, nothing_pending
from shoal import wire
from shoal.config import ModelConfig
from shoal.errors import ChildDied, EngineError, ModelError, RequestRefused, TrainerError
from shoal.net.server import Refused
from shoal.tinker.app import TinkerApp
from shoal.tinker.bodies import encoded
from shoal.tinker.data import gradient_of
from shoal.tinker.models_trainer import ServerSettings
from shoal.tinker.service import MOST_OPEN, SILENT_S, TinkerService
from shoal.tinker.store import Sampler, Store, owner_of
from shoal.trainer.messages import (
    MOST_RATE,
    Accumulate,
    Accumulated,
    Adam,
    Adapter,
    Answer,
    Close,
    Done,
    GradientDone,
    LoadCheckpoint,
    Open,
    OptimStep,
    Request,
    SaveCheckpoint,
    TrainerFailed,
    WriteVersion,
)
from shoal.trainer.models import TrainedModels
from shoal.trainer.ranks import ALONE
from shoal.trainer.worker import Server, TrainerProcess
from until import until

WAIT_S = 60
RAISED: list[BaseException | Answer] = [
    ChildDied("the trainer process ended"),
    EngineError("KeyError: 'x'"),
    RequestRefused("no"),
    ModelError("no such weights"),
    KeyError("x"),
    OverflowError("too large"),
    RuntimeError("CUDA"),
    OSError("no space"),
    TimeoutError(),
    Done(float("nan")),
    TrainerFailed("RuntimeError"),
    Accumulated(()),
]
"""What a trainer does with a request, or answers to it."""
BODIES = [b"", b"null", b"\xff", b"{}", b'{"learning_rate":null}', b'{"learning_rate":1e38}', b"[" * 10_000]
KINDS = ["forward_backward", "optim_step", "save", "save_for_sampler", "load", "unload"]
ADAM = json.dumps({"learning_rate": 1e-3}).encode()


Script: TypeAlias = Callable[[], BaseException | Answer]


class ScriptedRank(RankHere):
    """Does what a script says with requests of the model `bad`, and computes nothing."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    def answer(self, request: Request) -> Answer:
        jobs = request.jobs if isinstance(request, Accumulate) else ()
        models = [job.name for job in jobs] or [getattr(request, "name", "")]
        if "bad" in models and not isinstance(request, Open | Close):
            does = self._script()
            if isinstance(does, BaseException):
                raise does
            return does
        if isinstance(request, Accumulate):
            return Accumulated(tuple(GradientDone(tuple(b"" for _ in job.data), 0.0, 1) for job in jobs))
        return Done(1.0, 1)


@asynccontextmanager
async def served(model: Path, folder: Path, script: Script) -> AsyncIterator[TinkerService]:
    @asynccontextmanager
    async def trainers() -> AsyncIterator[TrainerProcess]:
        yield TrainerProcess([ScriptedRank(script)])

    async with TinkerService(ServerSettings({"tiny": model}, folder, engines=0), trainers=trainers) as service:
        yield service


class BusyRank(ScriptedRank):
    """Cannot close a model at the next `failures` attempts; a request has two."""

    failures = 2

    def answer(self, request: Request) -> Answer:
        if isinstance(request, Close) and BusyRank.failures:
            BusyRank.failures -= 1
            return TrainerFailed("busy")
        return super().answer(request)


async def test_a_model_whose_unload_failed_can_be_unloaded_again(tiny_model_dir: Path, tmp_path: Path) -> None:
    @asynccontextmanager
    async def trainers() -> AsyncIterator[TrainerProcess]:
        yield TrainerProcess([BusyRank(lambda: Done(1.0))])

    settings = ServerSettings({"tiny": tiny_model_dir}, tmp_path, engines=0)
    async with TinkerService(settings, trainers=trainers) as service:
        service.store.add_session("s", "owner")
        service.store.add_model("m", "s", "tiny", encoded(Adapter(2)), "", False)
        model = service.store.model("m")
        assert model is not None
        states = []
        for _ in range(3):
            id_ = service.unload(model)
            answer = await service.futures.result(id_, WAIT_S)
            assert answer is not None
            states.append(answer.state)
        assert states == ["failed", "done", "done"]


def rows(model: str) -> bytes:
    return proto(gradients(weights=floats(1.0)) | {"model_id": model, "seq_id": 1})


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(st.tuples(st.sampled_from(KINDS), st.none() | st.sampled_from(BODIES)), min_size=1, max_size=30),
    script=st.lists(st.sampled_from(RAISED), min_size=1, max_size=4),
    samples=st.lists(st.sampled_from([*BODIES, b'{"prompt":{"chunks":[]}}']), max_size=3),
)
def test_a_request_that_raises_or_cannot_be_read_ends_only_itself_also_after_a_restart(
    tiny_model_dir: Path,
    asked: list[tuple[str, bytes | None]],
    script: list[BaseException | Answer],
    samples: list[bytes],
) -> None:
    turn = iter(range(10**9))

    def does() -> BaseException | Answer:
        return script[next(turn) % len(script)]

    async def both(folder: Path) -> list[tuple[str, str]]:
        own: list[str] = []
        for start in range(2):
            async with served(tiny_model_dir, folder, does) as service:
                store = service.store
                if start == 0:
                    store.add_session("s", "owner")
                    store.add_sampler(Sampler("sampler", "s", "tiny", "", ""))
                    for model in ("bad", "good"):
                        store.add_model(model, "s", "tiny", encoded(Adapter(2)), "", False)
                        service.submit(f"{model}/0", model, "create", b"")
                    for number, body in enumerate(samples):
                        service.submit(f"sampler/{number}", "sampler", "sample", body)
                for number, (kind, body) in enumerate(asked, 1 + 100 * start):
                    plain = rows("bad") if kind == "forward_backward" else ADAM if kind == "optim_step" else b"{}"
                    service.submit(f"bad/{number}", "bad", kind, plain if body is None else body)
                    own.append(service.submit(f"good/{2 * number}", "good", "forward_backward", rows("good")))
                    own.append(service.submit(f"good/{2 * number + 1}", "good", "optim_step", ADAM))
                await until(partial(nothing_pending, store), WAIT_S)
                found = [await service.futures.result(id_, 0) for id_ in own]
        return [(one.id, one.state) for one in found if one is not None]

    with TemporaryDirectory() as folder:
        states = asyncio.run(both(Path(folder)))
    assert len(states) == 4 * len(asked)
    assert {state for _, state in states} == {"done"}


MODEL_JSON = ModelConfig(device="cpu").model_dump_json()


@pytest.fixture(scope="module")
def models(tiny_model_dir: Path) -> TrainedModels:
    models = TrainedModels()
    models.open(Open("model", str(tiny_model_dir), MODEL_JSON, Adapter(2)))
    return models


HONEST = [body for route, body in POSTS.items() if route.startswith("forward_backward")] + [
    gradients("cispo", **POLICY)
]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), changes=st.integers(1, 4), honest=st.sampled_from(HONEST))
def test_rows_of_any_kind_are_refused_by_field_or_computed_and_no_bug_of_the_trainers(
    models: TrainedModels, seed: int, changes: int, honest: dict[str, Any]
) -> None:
    dice, body = Random(seed), {**honest, "model_id": "model", "seq_id": 1}
    for _ in range(changes):
        part = dice.choice(["data", "data", "data", "config", "loss_fn"])
        body = {**body, part: mutated(body[part], dice)}
    try:
        job = gradient_of(proto(body, dice), 0)
    except RequestRefused:
        return
    (answer,) = models.accumulate([job])
    assert isinstance(answer, GradientDone) or answer.refused


def test_a_model_that_is_not_open_can_be_asked_anything(tiny_model_dir: Path, tmp_path: Path) -> None:
    server, path = Server(ALONE, TrainedModels(), None), str(tiny_model_dir)
    assert isinstance(server.answer(wire.encode(Open("model", path, MODEL_JSON, Adapter(2)))), Done)
    asked: list[Request] = [
        OptimStep("none", Adam()),
        SaveCheckpoint(str(tmp_path), name="none"),
        WriteVersion(str(tmp_path / "adapter_model.safetensors"), push=False, name="none"),
        LoadCheckpoint(str(tmp_path), "none"),
        LoadCheckpoint(str(tmp_path), "model"),
        Open("new", str(tmp_path / "nowhere"), MODEL_JSON, Adapter(2)),
        OptimStep("new", Adam()),
    ]
    for request in asked:
        answer = server.answer(wire.encode(request))
        assert isinstance(answer, TrainerFailed), request
        assert answer.refused, answer
    assert isinstance(server.answer(wire.encode(Close("none"))), Done)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rate=st.floats(0, MOST_RATE), decay=st.floats(0, MOST_RATE), eps=st.sampled_from([0.0, 1e-300, 1e-12, 0.5]),
    beta1=st.floats(0, 1, exclude_max=True), beta2=st.floats(0, 1, exclude_max=True),
    clip=st.sampled_from([0.0, 1e-30, 1.0, 1e38]), grad=st.sampled_from([0.0, 1e-30, 1.0, 1e20, 1e38, float("inf")]),
)  # fmt: skip
def test_a_step_leaves_finite_weights_or_the_ones_that_were(
    models: TrainedModels,
    tiny_model_dir: Path,
    rate: float,
    decay: float,
    eps: float,
    beta1: float,
    beta2: float,
    clip: float,
    grad: float,
) -> None:
    assume(rate * decay < 2)  # `Adam` refuses others
    models.open(Open("stepped", str(tiny_model_dir), MODEL_JSON, Adapter(2)))
    trained = models["stepped"]
    assert trained.adapters is not None
    parameters = trained.adapters.parameters(trained.owner)
    for parameter in parameters.values():
        parameter.grad = parameter.detach() * 0 + grad
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with TemporaryDirectory() as folder:
        try:
            trained.update(Adam(rate, beta1, beta2, eps, decay, clip))
        except TrainerError:
            assert trained.updates == 0
            trained.save(Path(folder))
            assert load_file(Path(folder) / "optimizer.safetensors").keys() == {"updates", "since_reset"}
            assert all(torch.equal(parameters[name], weight) for name, weight in before.items())
        else:
            trained.save(Path(folder))
            files = [load_file(path) for path in Path(folder).iterdir()]
            assert all(bool(tensor.isfinite().all()) for file in files for tensor in file.values())
    models.close("stepped")


def test_only_requests_that_a_restart_repeats_are_kept_after_their_time(tiny_model_dir: Path, tmp_path: Path) -> None:
    fields, taken = gradients(weights=floats(1.0)) | {"model_id": "m", "seq_id": 1}, list[Request]()
    changing_nothing = [("forward_backward", proto(fields | {"forward_only": True})), ("save", b"{}"), ("load", b"{}")]
    gradient, refused = ("forward_backward", proto(fields)), json.dumps({"learning_rate": 7}).encode()
    steps = [*changing_nothing, gradient, ("optim_step", ADAM), gradient, ("optim_step", refused)]
    asked = [("create", b""), *steps, *changing_nothing, gradient, gradient]

    class Recorder(ScriptedRank):
        def answer(self, request: Request) -> Answer:
            taken.append(request)
            is_refused = isinstance(request, OptimStep) and request.adam.learning_rate == 7
            return TrainerFailed("no weight was changed", refused=True) if is_refused else super().answer(request)

    @asynccontextmanager
    async def trainers() -> AsyncIterator[TrainerProcess]:
        yield TrainerProcess([Recorder(KeyError)])

    async def main() -> list[Request]:
        of = ServerSettings({"tiny": tiny_model_dir}, tmp_path, engines=0)
        async with TinkerService(of, trainers=trainers) as service:
            service.store.add_session("s", "owner")
            service.store.add_model("m", "s", "tiny", encoded(Adapter(2)), "", False)
            for number, (kind, body) in enumerate(asked):
                service.submit(f"m/{number}", "m", kind, body)
            await until(partial(nothing_pending, service.store), WAIT_S)
            service.store.forget(before=1e12)
            there = [n for n in range(len(asked)) if service.store.request(f"m/{n}") is not None]
            assert there == [0, len(asked) - 2, len(asked) - 1]
        taken.clear()
        async with TinkerService(of, trainers=trainers) as service:
            service.submit("m/100", "m", "optim_step", ADAM)
            await until(partial(nothing_pending, service.store), WAIT_S)
        return [request for request in taken if isinstance(request, Accumulate) and request.jobs]

    assert len(asyncio.run(main())) == 2


def test_a_store_forgets_all_requests_of_a_model_that_is_unloaded_and_of_others_what_their_states_contain(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path / "server.sqlite")
    store.add_session("session", "owner")
    for model in ("open", "unloaded"):
        store.add_model(model, "session", "tiny", "{}", "", False)
        for number, kind in enumerate(("create", "optim_step", "forward_backward", "save")):
            store.add_request(f"{model}/{number}", model, kind, b"{}")
            store.resolve(f"{model}/{number}", b"{}", repeats=kind != "save")
        stepped = store.request(f"{model}/1")
        assert stepped is not None
        store.set_state(model, "state", stepped.number)
    store.close_model("unloaded")
    store.forget(before=1e12)
    assert [store.request(f"open/{n}") is None for n in range(4)] == [False, True, False, True]
    assert [store.request(f"unloaded/{n}") is None for n in range(4)] == [False, True, True, True]
    store.close()


def test_at_the_limit_a_model_whose_client_is_silent_makes_room_and_one_that_lives_does_not(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    now_s = [0.0]

    async def main() -> None:
        settings = ServerSettings({"tiny": tiny_model_dir}, tmp_path, engines=0)
        async with TinkerService(settings, clock=lambda: now_s[0]) as service:
            store, owner = service.store, owner_of("key")
            http = httpx.ASGITransport(TinkerApp(service, ("key",)).app)
            client = httpx.AsyncClient(
                transport=http, base_url="http://localhost/api/v1/", headers={"X-API-Key": "key"}
            )

            async def heard(route: str, **body: str) -> None:
                answer = await client.post(route, json={"type": route, **body})
                assert answer.status_code == 200, answer.text

            for session in ("killed", "alive"):
                store.add_session(session, owner)
                for number in range(MOST_OPEN // 2):
                    store.add_model(f"{session}{number}", session, "tiny", encoded(Adapter(2)), "", False)
            now_s[0] = SILENT_S - 1
            await heard("get_info", model_id="alive0")
            with pytest.raises(Refused, match="at most 64 models"):
                service.make_room(owner)
            service.make_room("another")
            now_s[0] = SILENT_S
            service.make_room(owner)
            service.make_room(owner)
            assert [request.target for request in store.pending()] == ["killed0"]
            assert len(store.open_models(owner)) == MOST_OPEN - 1
            store.close_model("killed0")
            await heard("session_heartbeat", session_id="killed")
            store.add_model("new", "alive", "tiny", encoded(Adapter(2)), "", False)
            with pytest.raises(Refused, match="at most 64 models"):
                service.make_room(owner)
            await client.aclose()

    asyncio.run(main())
