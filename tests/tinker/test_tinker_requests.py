"""A request of a Tinker server ends only itself: bounds, repeated numbers, names and keys."""

import json
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from fuzz_tinker import API, DENSE, POSTS, SPARSE, floats, fuzz, gradients, proto
from shoal.tinker.store import Sampler, Store
from tinker_clients import TIMEOUT_S, TOKENS, client_of, datum, logprobs, stepped, trained
from tinker_server import KEYS, TinkerServer, tinker_serving

# The package leaves connections to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    with tinker_serving(tiny_model_dir, tmp_path_factory.mktemp("tinker")) as running:
        yield running


@pytest.fixture
def service(server: TinkerServer) -> Iterator[tinker.ServiceClient]:
    with client_of(server, KEYS[0]) as client:
        yield client


@pytest.fixture(scope="module")
def opened(server: TinkerServer) -> Iterator[tuple[str, str, str]]:
    """Session, model and sampler of the first key."""
    with client_of(server, KEYS[0]) as client:
        model = trained(client).model_id
        session = model.partition(":")[0]
        fields = {"session_id": session, "sampling_session_seq_id": 500, "base_model": "tiny"}
        yield session, model, str(asked(server, "create_sampling_session", fields).json()["sampling_session_id"])


def asked(server: TinkerServer, route: str, fields: dict[str, Any] | str | bytes) -> httpx.Response:
    content = fields if isinstance(fields, str | bytes) else json.dumps(fields)
    return httpx.post(server.url + API + route, headers={"X-API-Key": KEYS[0]}, content=content)


def stored(server: TinkerServer) -> int:
    with closing(sqlite3.connect(server.folder / "server.sqlite")) as store:
        return int(store.execute("SELECT count(*) FROM requests").fetchone()[0])


HUGE = 10**30
ADAM = ("optim_step", "adam_params")
SAMPLE, LISTED = ("asample",), ("asample", "target_prompt_logprobs")
WRONG: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (ADAM, {"learning_rate": float("nan")}, "byte"),
    (ADAM, {"learning_rate": float("inf")}, "learning_rate"),
    (ADAM, {"learning_rate": 1e38}, "learning_rate"),
    (ADAM, {"learning_rate": -1e-3}, "learning_rate"),
    (ADAM, {"beta1": 1.0}, "beta1"),
    (ADAM, {"beta2": 1.0}, "beta2"),
    (ADAM, {"eps": -1.0}, "eps"),
    (ADAM, {"weight_decay": 1e38}, "weight_decay"),
    (ADAM, {"learning_rate": 4.0, "weight_decay": 0.5}, "weight_decay"),
    (("optim_step",), {"seq_id": None}, "seq_id"),
    (("optim_step",), {"seq_id": 0}, "seq_id"),
    (("optim_step",), {"optim_params": {}}, "adam_params"),
    (("create_model", "lora_config"), {"rank": 513}, "rank"),
    (("create_model", "lora_config"), {"rank": 0}, "rank"),
    (("create_model", "lora_config"), {"seed": HUGE}, "seed"),
    (("create_model", "lora_config"), {"train_mlp": False, "train_attn": False}, "train_attn"),
    (("create_model",), {"model_seq_id": -1}, "model_seq_id"),
    (("create_model",), {"optimizer_config": {"type": "dimuon"}}, "optimizer_config"),
    (SAMPLE, {"num_samples": 4_000_000}, "num_samples"),
    (SAMPLE, {"num_samples": 0}, "num_samples"),
    (SAMPLE, {"topk_prompt_logprobs": HUGE}, "topk_prompt_logprobs"),
    (SAMPLE, {"prompt": {"chunks": []}}, "prompt"),
    (SAMPLE, {"prompt": {"chunks": [{"tokens": [1]}] * 1025}}, "chunks"),
    (SAMPLE, {"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "type"),
    (("asample", "sampling_params"), {"seed": HUGE}, "seed"),
    (("asample", "sampling_params"), {"max_tokens": 0}, "max_tokens"),
    (("asample", "sampling_params"), {"temperature": -1}, "temperature"),
    (("asample", "sampling_params"), {"stop": ["a"] * 65}, "stop"),
    (("asample", "sampling_params"), {"stop": ["a", 1]}, "stop"),
    (LISTED, {"data": [], "shape": [1, 0]}, "shape"),
    (LISTED, {"shape": [1, 2, 1]}, "shape"),
    (LISTED, {"data": [1.5, 2.5]}, "data"),
    (LISTED, {"data": [HUGE, 1]}, "data"),
    (LISTED, {"sparse_crow_indices": [0, 9]}, "sparse_crow_indices"),
    (LISTED, {"sparse_crow_indices": [0, 2], "sparse_col_indices": [0, 2]}, "sparse_col_indices"),
    (("save_weights",), {"ttl_seconds": 10**15}, "ttl_seconds"),
    (("save_weights",), {"ttl_seconds": -1}, "ttl_seconds"),
    (("save_weights",), {"path": "../x"}, "path"),
    (("save_weights_for_sampler",), {"seq_id": None}, "seq_id"),
]


@pytest.mark.parametrize(("place", "fields", "named"), WRONG, ids=[f"{p[0]}-{f}"[:60] for p, f, _ in WRONG])
def test_what_is_out_of_bounds_is_refused_by_its_field_and_not_stored(
    server: TinkerServer, opened: tuple[str, str, str], place: tuple[str, ...], fields: dict[str, Any], named: str
) -> None:
    route, *inner = place
    session, model, sampler = opened
    body = json.loads(json.dumps(POSTS[route]).replace('"{order}"', "900"))
    names = {"session_id": session, "model_id": model, "sampling_session_id": sampler}
    body |= {name: value for name, value in names.items() if name in body}
    part = body[inner[0]] if inner else body
    part |= {name: value for name, value in fields.items() if value is not None}
    for name in [name for name, value in fields.items() if value is None]:
        del part[name]
    before = stored(server)
    answer = asked(server, route, json.dumps(body).replace("Infinity", "1e999"))
    assert (answer.status_code, named in answer.text) == (400, True), answer.text
    assert stored(server) == before


def row(tokens: list[int] | bytes = TOKENS[:-1], targets: dict[str, Any] = DENSE, **inputs: Any) -> dict[str, Any]:
    return {"tokens": tokens, "inputs": {"target_tokens": targets, "weights": floats(1.0), **inputs}}


LONG = [1] * 100_000
EACH = {"dtype": 1, "shape": [len(LONG)], "dense": LONG}
ROWS: dict[str, dict[str, Any]] = {
    "seq_id": {"seq_id": 0},
    "expected at most 1024 rows": {"data": [row()] * 1025},
    "loss_fn_config: expected at most 64 parts": {"config": {str(number): 1.0 for number in range(65)}},
    "data: expected at most 65536 parts": {"data": [row(**{str(number): {} for number in range(1 << 16)})]},
    "model_input": {"data": [row(b"abc")]},
    "expected 1 to .* tokens, got 100000": {
        "data": [row(LONG, EACH | {"dtype": 2}, weights=EACH)],
    },
    "expected a tensor of shape": {"data": [row(targets=SPARSE | {"shape": [6, 10**9]})]},
    r"weights: expected a tensor of shape": {"data": [row(weights=floats(1.0) | {"shape": [0]})]},
    r"data\[0\].weights: expected finite": {"data": [row(weights=floats(float("nan")))]},
    r"loss_fn_config.clip_low": {"loss_fn": "ppo", "config": {"clip_low_threshold": float("nan")}},
    r"loss_fn_config.max_staleness": {"config": {"max_staleness": float("inf")}},
    r"data\[0\].versions": {"data": [row(versions=floats(float("inf")))]},
}


@pytest.mark.parametrize("words", ROWS)
def test_wrong_rows_are_an_error_of_their_own_request(
    server: TinkerServer, opened: tuple[str, str, str], words: str
) -> None:
    body = gradients(weights=floats(1.0)) | {"model_id": opened[1], "seq_id": 1000 + list(ROWS).index(words)}
    answer = asked(server, "forward_backward", proto(body | ROWS[words]))
    result = waited(server, answer.json()["request_id"]).text if answer.is_success else answer.text
    assert re.search(words, result), result


def waited(server: TinkerServer, request_id: str) -> httpx.Response:
    while True:
        answer = asked(server, "retrieve_future", {"request_id": request_id})
        if answer.status_code != httpx.codes.REQUEST_TIMEOUT:
            return answer


def test_a_number_is_one_requests_and_its_repetition_gives_the_same_future(
    server: TinkerServer, service: tinker.ServiceClient
) -> None:
    model = trained(service).model_id
    step = {"model_id": model, "seq_id": 7, "adam_params": {"learning_rate": 0.0}}
    futures = [asked(server, "optim_step", step).json()["request_id"] for _ in range(2)]
    assert futures[0] == futures[1]
    for route, body in (
        ("optim_step", {**step, "adam_params": {"learning_rate": 0.5}}),
        ("save_weights", {"model_id": model, "seq_id": 7, "path": "other"}),
        ("forward_backward", proto(gradients(weights=floats(1.0)) | {"model_id": model, "seq_id": 7})),
        ("create_model", POSTS["create_model"] | {"session_id": model.split(":")[0], "model_seq_id": int(model[-1])}),
    ):
        answer = asked(server, route, body)
        assert (answer.status_code, "was another request" in answer.text) == (400, True), answer.text
    metrics = waited(server, futures[0]).json()["metrics"]
    assert (metrics["learning_rate"], metrics["version"]) == (0.0, 1.0)


def test_a_sampler_keeps_its_weights_when_their_name_is_saved_anew(service: tinker.ServiceClient) -> None:
    client, prompt = trained(service), types.ModelInput.from_ints(TOKENS)
    stepped(client, 1)

    def saved() -> tinker.SamplingClient:
        path = client.save_weights_for_sampler("latest").result(TIMEOUT_S).path
        return service.create_sampling_client(model_path=path).result(TIMEOUT_S)

    first = saved()
    before = first.compute_logprobs(prompt).result(TIMEOUT_S)[1:]
    stepped(client, 2)
    second = saved()
    assert first.compute_logprobs(prompt).result(TIMEOUT_S)[1:] == before
    assert second.compute_logprobs(prompt).result(TIMEOUT_S)[1:] == pytest.approx(logprobs(client), abs=1e-4)
    assert second.compute_logprobs(prompt).result(TIMEOUT_S)[1:] != pytest.approx(before, abs=1e-3)


@pytest.mark.parametrize("names", [("x", "x.unfinished"), ("x.unfinished", "x"), (".", ".."), ("1", "1.unfinished")])
def test_no_name_of_a_checkpoint_harms_another(service: tinker.ServiceClient, names: tuple[str, str]) -> None:
    client = trained(service)
    paths, wanted = [], []
    for name in names:
        stepped(client, 1)
        paths.append(client.save_state(name).result(TIMEOUT_S).path)
        wanted.append(logprobs(client))
    for path, values in zip(paths, wanted, strict=True):
        restored = service.create_training_client_from_state(path).result(TIMEOUT_S)
        assert logprobs(restored) == pytest.approx(values, abs=1e-6)


def test_a_step_that_would_leave_no_finite_weights_changes_none(service: tinker.ServiceClient) -> None:
    client = trained(service)
    stepped(client, 1)
    before = logprobs(client)
    huge = datum(weights=[3e38] * (len(TOKENS) - 1))
    client.forward_backward([huge], "cross_entropy").result(TIMEOUT_S)
    with pytest.raises(tinker.RequestFailedError, match="no weight was changed"):
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)
    assert logprobs(client) == before
    losses = stepped(client, 3)
    assert losses[2] < losses[0]


def test_a_key_has_so_many_models_and_no_more_until_it_unloads_one(server: TinkerServer) -> None:
    with client_of(server, KEYS[1]) as stranger:
        session = trained(stranger).model_id.partition(":")[0]
        headers = {"X-API-Key": KEYS[1]}
        fields = POSTS["create_model"] | {"session_id": session}
        statuses = [
            httpx.post(f"{server.url}{API}create_model", headers=headers, json=fields | {"model_seq_id": n}).status_code
            for n in range(100, 164)
        ]
        assert statuses == [200] * 63 + [429]
        assert httpx.post(f"{server.url}{API}sessions/{session}/finish", headers=headers).is_success


def test_no_file_holds_a_key(server: TinkerServer, service: tinker.ServiceClient) -> None:
    trained(service)
    for folder, _, names in os.walk(server.folder):
        for name in names:
            with suppress(FileNotFoundError):  # the server forgets what other tests' sessions had
                assert KEYS[0].encode() not in Path(folder, name).read_bytes(), name


def test_the_newest_loose_weights_of_every_session_stay(tmp_path: Path) -> None:
    store = Store(tmp_path / "server.sqlite")
    for number, (session, folder) in enumerate([("a", "1"), ("b", "1"), ("a", "2"), ("a", "1"), ("a", "")]):
        store.add_sampler(Sampler(f"{session}{number}", session, "tiny", "", folder))
    assert (store.loose("a"), store.loose("b"), sorted(store.sessions_of("1"))) == (["2", "1"], ["1"], ["a", "b"])
    store.close()


@pytest.mark.timeout(600)
def test_hostile_requests_of_one_key_leave_the_client_of_another_alone() -> None:
    report = fuzz(240, kills=1)
    assert report["found"] == []
    assert report["neighbour"]["rounds"] >= 3
    assert report["futures"]["user"] > 0
    assert report["statuses"]["200"] > report["requests"] / 8
