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

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tinker.proto import tinker_public_pb2 as pb

from fuzz_attack import mutated
from fuzz_tinker import POLICY, POSTS, floats, gradients, proto
from shoal import wire
from shoal.config import ModelConfig
from shoal.errors import ChildDied, EngineError, ModelError, RequestRefused, TrainerError
from shoal.tinker import messages as m
from shoal.tinker.service import ServerSettings, TinkerService
from shoal.tinker.store import Sampler, Store
from shoal.tinker.worker import Base, _answer
from shoal.trainer.messages import MOST_RATE, Adam, Adapter, Open
from shoal.trainer.models import TrainedModels
from until import until

WAIT_S = 60
RAISED: list[BaseException | bytes] = [
    ChildDied("the trainer process ended"),
    EngineError("KeyError: 'x'"),
    RequestRefused("no"),
    ModelError("no such weights"),
    KeyError("x"),
    OverflowError("too large"),
    RuntimeError("CUDA"),
    OSError("no space"),
    TimeoutError(),
    b"",
    wire.encode(m.Failed("RuntimeError", False)),
    wire.encode(m.CarriedOut()),
]
"""What a trainer does with a request, or answers to it."""
BODIES = [b"", b"null", b"\xff", b"{}", b'{"learning_rate":null}', b'{"learning_rate":1e38}', b"[" * 10_000]
KINDS = ["forward_backward", "optim_step", "save", "save_for_sampler", "load", "unload"]
ADAM = json.dumps({"learning_rate": 1e-3}).encode()


Script: TypeAlias = Callable[[], BaseException | bytes]


class ScriptedTrainer:
    """Implements `trainer.ModelsTrainer`: does what a script says with requests of the model `bad`."""

    replaced = False

    def __init__(self, script: Script) -> None:
        self._script = script

    async def exchanged(self, request: m.Request, timeout_s: float) -> bytes:
        bodies = request.bodies if isinstance(request, m.ForwardBackward) else ()
        models = [pb.ForwardBackwardRequest.FromString(body).model_id for body in bodies] or [
            getattr(request, "model_id", "")
        ]
        if "bad" in models and not isinstance(request, m.Open | m.Close):
            does = self._script()
            if isinstance(does, BaseException):
                raise does
            return does
        parts = tuple(m.CarriedOut(1, b"", {}) for _ in bodies)
        return wire.encode(m.CarriedOut(1, b"", {"unclipped_grad_l2:mean": 1.0, "learning_rate": 1e-3}, parts))


@asynccontextmanager
async def served(
    model: Path, folder: Path, script: Callable[[], BaseException | bytes]
) -> AsyncIterator[TinkerService]:
    @asynccontextmanager
    async def trainers() -> AsyncIterator[ScriptedTrainer]:
        yield ScriptedTrainer(script)

    async with TinkerService(ServerSettings({"tiny": model}, folder, engines=0), trainers=trainers) as service:
        yield service


def nothing_pending(store: Store) -> bool:
    return not store.pending()


def rows(model: str) -> bytes:
    return proto(gradients(weights=floats(1.0)) | {"model_id": model, "seq_id": 1})


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(st.tuples(st.sampled_from(KINDS), st.none() | st.sampled_from(BODIES)), min_size=1, max_size=6),
    script=st.lists(st.sampled_from(RAISED), min_size=1, max_size=4),
    samples=st.lists(st.sampled_from([*BODIES, b'{"prompt":{"chunks":[]}}']), max_size=3),
)
def test_a_request_that_raises_or_cannot_be_read_ends_only_itself_also_after_a_restart(
    tiny_model_dir: Path,
    asked: list[tuple[str, bytes | None]],
    script: list[BaseException | bytes],
    samples: list[bytes],
) -> None:
    turn = iter(range(10**9))

    def does() -> BaseException | bytes:
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
                        store.add_model(model, "s", "tiny", None, "", False)
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


@pytest.fixture
def base(tiny_model_dir: Path) -> Base:
    return Base({"tiny": tiny_model_dir}, MODEL_JSON)


HONEST = [body for route, body in POSTS.items() if route.startswith("forward_backward")] + [
    gradients("cispo", **POLICY)
]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), changes=st.integers(1, 4), honest=st.sampled_from(HONEST))
def test_rows_of_any_kind_are_refused_by_field_or_computed_and_no_bug_of_the_trainers(
    models: TrainedModels, base: Base, seed: int, changes: int, honest: dict[str, Any]
) -> None:
    dice, body = Random(seed), {**honest, "model_id": "model", "seq_id": 1}
    for _ in range(changes):
        part = dice.choice(["data", "data", "data", "config", "loss_fn"])
        body = {**body, part: mutated(body[part], dice)}
    frame = wire.encode(m.ForwardBackward((proto(body, dice),)))
    (answer,) = (m.answer_from(said) for said in _answer(models, base, frame, Path()))
    assert isinstance(answer, m.CarriedOut), answer
    (of_model,) = answer.parts
    assert isinstance(of_model, m.CarriedOut) or of_model.refused


def test_a_model_that_is_not_open_can_be_asked_anything(models: TrainedModels, base: Base, tmp_path: Path) -> None:
    asked: list[m.Request] = [
        m.Close("none"),
        m.OptimStep("none", Adam()),
        m.Save("none", str(tmp_path)),
        m.Save("none", str(tmp_path), served=True),
        m.Load("none", str(tmp_path), optimizer=True),
        m.Load("model", str(tmp_path), optimizer=True),
        m.Open("new", "tiny", Adapter(2), str(tmp_path / "gone")),
        m.Open("new", "another base", Adapter(2)),
        m.OptimStep("new", Adam()),
    ]
    for request in asked:
        (answer,) = (m.answer_from(said) for said in _answer(models, base, wire.encode(request), Path()))
        refused = isinstance(answer, m.Failed) and answer.refused
        assert refused or request == m.Close("none"), (request, answer)


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
