"""`shoal serve tinker` answers the real `tinker` package: numbers as torch's, futures that outlive the server."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tinker
import torch
import zstandard
from tinker import types

from benchmarks.tinker import compared
from engine_models import plain
from shoal.model.renderer_loading import load_renderer
from shoal.observe.metrics import WatchedRun
from shoal.tinker.requests import MOST_BYTES
from tinker_clients import TIMEOUT_S, TOKENS, client_of, datum, logprobs, stepped, trained
from tinker_server import KEYS, TinkerServer, tinker_serving
from train_runs import children

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


def test_logprobs_are_those_of_transformers(service: tinker.ServiceClient, tiny_model_dir: Path) -> None:
    model = plain(tiny_model_dir)
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)
    wanted = logits.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()
    client = trained(service)  # a new adapter changes nothing
    assert logprobs(client) == pytest.approx(wanted, abs=1e-5)


def test_targets_need_not_be_the_next_tokens_and_may_be_several(
    service: tinker.ServiceClient, tiny_model_dir: Path
) -> None:
    targets = torch.tensor([[7, 8], [9, 10], [11, 12]])
    with torch.no_grad():
        logits = plain(tiny_model_dir)(torch.tensor([TOKENS[:3]])).logits[0].log_softmax(-1)
    inputs = {"target_tokens": targets, "weights": torch.ones(3, 2)}
    wanted = logits.gather(-1, targets).flatten().tolist()
    output = trained(service).forward([types.Datum(types.ModelInput.from_ints(TOKENS[:3]), inputs)], "cross_entropy")
    found = output.result(TIMEOUT_S).loss_fn_outputs[0]["logprobs"]
    assert found.shape == [3, 2]
    assert list(found.data) == pytest.approx(wanted, abs=1e-5)


def test_a_custom_loss_has_the_gradient_of_its_built_in_twin(service: tinker.ServiceClient) -> None:
    built_in, custom = trained(service), trained(service)
    weights = [0.5, 1.0, 2.0, 0.0, 1.0, 3.0]
    given = [datum(weights=weights)]
    built_in.forward_backward(given, "cross_entropy").result(TIMEOUT_S)

    def loss(data: object, outputs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -(outputs[0] * torch.tensor(weights)).sum(), {}

    custom.forward_backward_custom(given, loss).result(TIMEOUT_S)
    for client in (built_in, custom):
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)
    assert logprobs(custom) == pytest.approx(logprobs(built_in), abs=1e-5)


def test_clients_of_two_keys_learn_and_sample_at_once_each_with_its_own_adapter(
    server: TinkerServer, service: tinker.ServiceClient
) -> None:
    with client_of(server, KEYS[1]) as stranger:
        first, second = trained(service), trained(stranger, rank=2)
        before = logprobs(second)
        losses = stepped(first, 3)
        assert losses[-1] < losses[0]
        assert logprobs(second) == pytest.approx(before, abs=1e-7)
        samplers = [c.save_weights_and_get_sampling_client().result(TIMEOUT_S) for c in (first, second)]
        prompt, params = types.ModelInput.from_ints(TOKENS[:2]), types.SamplingParams(max_tokens=6, seed=3)
        answers = [sampler.sample(prompt, 2, params) for sampler in samplers]  # both are under way at once
        for client, answer in zip((first, second), answers, strict=True):
            for sequence in answer.result(TIMEOUT_S).sequences:
                own = logprobs(client, [*TOKENS[:2], *sequence.tokens])[1:]
                assert list(sequence.logprobs or []) == pytest.approx(own, abs=1e-4)
    assert len(children(server.process, "shoal.engine.server.http_server")) == 1


def test_gradients_of_clients_computed_together_are_each_ones_own(service: tinker.ServiceClient) -> None:
    datums = [datum([40, 41, 42, 50, 51, 43, 60]), datum([40, 41, 7, 8]), datum([9, 10, 11])]
    alone, together = [trained(service, rank=2) for _ in datums], [trained(service, rank=2) for _ in datums]
    for client, given in zip(alone, datums, strict=True):
        client.forward_backward([given], "cross_entropy").result(TIMEOUT_S)
    for future in [c.forward_backward([d], "cross_entropy") for c, d in zip(together, datums, strict=True)]:
        future.result(TIMEOUT_S)
    for client in (*alone, *together):
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)
    for one, other in zip(alone, together, strict=True):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-5)


def test_sampled_logprobs_are_those_of_the_trained_model(service: tinker.ServiceClient) -> None:
    client = trained(service)
    stepped(client, 2)
    sampler = client.save_weights_and_get_sampling_client().result(TIMEOUT_S)
    prompt = types.ModelInput.from_ints(TOKENS[:2])
    params = types.SamplingParams(max_tokens=6, seed=3)
    answer = sampler.sample(prompt, 2, params).result(TIMEOUT_S)
    assert len(answer.sequences) == 2
    for sequence in answer.sequences:
        whole = [*TOKENS[:2], *sequence.tokens]
        assert list(sequence.logprobs or []) == pytest.approx(logprobs(client, whole)[1:], abs=1e-4)
    asked = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result(TIMEOUT_S)
    assert asked[0] is None
    assert asked[1:] == pytest.approx(logprobs(client), abs=1e-4)


def test_likely_and_listed_tokens_have_the_models_logprobs(service: tinker.ServiceClient, tiny_model_dir: Path) -> None:
    with torch.no_grad():
        logp = plain(tiny_model_dir)(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    sampler = service.create_sampling_client(base_model="tiny").result(TIMEOUT_S)
    listed = [[7, -1], [-1, -1], [9, 10], [-1, 4], [1, 2], [3, 3]]
    answer = sampler.sample(
        types.ModelInput.from_ints(TOKENS),
        1,
        types.SamplingParams(max_tokens=3, temperature=0),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData.from_torch(torch.tensor(listed)),
    ).result(TIMEOUT_S)
    top = answer.topk_prompt_logprobs
    assert top is not None
    assert top[0] is None
    for row, wanted in zip(top[1:], logp.topk(3).values, strict=False):
        assert row is not None
        assert [value for _, value in row] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert answer.target_prompt_logprobs is not None
    expected = [float(logp[i, j]) if j >= 0 else 0.0 for i, row in enumerate(listed) for j in row]
    assert list(answer.target_prompt_logprobs.data) == pytest.approx(expected, abs=1e-4)
    best = answer.sequences[0].topk_logprobs
    assert best is not None
    assert [row[0][0] for row in best if row] == answer.sequences[0].tokens


def test_every_token_has_a_version_and_what_is_too_old_is_refused(
    server: TinkerServer, service: tinker.ServiceClient
) -> None:
    client = trained(service)
    stepped(client, 2)
    sampler = client.save_weights_and_get_sampling_client().result(TIMEOUT_S)
    stepped(client, 2)
    params = types.SamplingParams(max_tokens=3, temperature=0)
    (sequence,) = sampler.sample(types.ModelInput.from_ints(TOKENS), 1, params).result(TIMEOUT_S).sequences
    asked = f"{server.url}/api/v1/sequences/{sequence.sequence_id}"
    versions = httpx.get(asked, headers={"X-API-Key": KEYS[0]}).json()["versions"]
    assert versions == [2] * len(sequence.tokens)
    assert httpx.get(asked, headers={"X-API-Key": KEYS[1]}).status_code == httpx.codes.NOT_FOUND
    whole = [*TOKENS, *sequence.tokens]
    prompt = [0.0] * (len(TOKENS) - 1)
    given = datum(
        whole,
        logprobs=[*prompt, *(sequence.logprobs or [])],
        advantages=[*prompt, *(1.0 for _ in versions)],
        versions=torch.tensor([*(-1.0 for _ in prompt), *map(float, versions)]),
    )
    client.forward_backward([given], "importance_sampling", {"max_staleness": 2}).result(TIMEOUT_S)
    with pytest.raises(tinker.RequestFailedError, match=r"at most .* steps before version 4, got 2"):
        client.forward_backward([given], "importance_sampling", {"max_staleness": 1}).result(TIMEOUT_S)


def test_the_bench_sets_steps_and_samples_against_the_work_alone(
    service: tinker.ServiceClient, tiny_model_dir: Path
) -> None:
    report = compared(service, "tiny", tiny_model_dir, rounds=1)
    assert report["clients"] == 1
    for name in ("sample_overhead_ms", "forward_backward_overhead_ms", "steps_per_s_ratio_to_native"):
        assert isinstance(report[name], float)
    assert float(str(report["steps_per_s_ratio_to_native"])) > 0


def test_a_restored_state_gives_the_same_next_step(service: tinker.ServiceClient) -> None:
    client = trained(service)
    stepped(client, 2)
    saved = client.save_state("two-steps").result(TIMEOUT_S).path
    after = stepped(client, 1), logprobs(client)
    restored = service.create_training_client_from_state_with_optimizer(saved).result(TIMEOUT_S)
    assert stepped(restored, 1) == pytest.approx(after[0], abs=1e-6)
    assert logprobs(restored) == pytest.approx(after[1], abs=1e-6)


def test_stops_and_seeds_bound_what_is_sampled(service: tinker.ServiceClient, tiny_model_dir: Path) -> None:
    sampler = service.create_sampling_client(base_model="tiny").result(TIMEOUT_S)
    renderer = load_renderer(tiny_model_dir)

    def sampled(stop: list[str] | list[int] | None = None, seed: int = 5) -> types.SampledSequence:
        params = types.SamplingParams(max_tokens=12, seed=seed, stop=stop)
        return sampler.sample(types.ModelInput.from_ints(TOKENS), 1, params).result(TIMEOUT_S).sequences[0]

    free = sampled([])
    assert sampled([]).tokens == free.tokens
    assert sampled([], seed=6).tokens != free.tokens
    assert free.stop_reason == "length"
    by_token = sampled([free.tokens[4]])
    assert (by_token.tokens, by_token.stop_reason) == (free.tokens[: free.tokens.index(free.tokens[4]) + 1], "stop")
    words = renderer.text(free.tokens[:7])[-2:]
    by_text = sampled([words])
    assert by_text.stop_reason == "stop"
    assert words in renderer.text(by_text.tokens)
    assert words not in renderer.text(by_text.tokens[:-1])


def test_checkpoints_are_listed_until_they_are_deleted_or_their_time_is_over(
    server: TinkerServer, service: tinker.ServiceClient
) -> None:
    client = trained(service)
    stepped(client, 2)
    first = client.save_state("first").result(TIMEOUT_S).path
    second, third = (client.save_weights_for_sampler(name).result(TIMEOUT_S).path for name in ("second", "third"))
    runs = f"{server.url}/api/v1/training_runs/{client.model_id}/checkpoints"
    with httpx.Client(headers={"X-API-Key": KEYS[0]}) as http:

        def listed() -> list[str]:
            return [one["tinker_path"] for one in http.get(runs).json()["checkpoints"]]

        assert listed() == [first, second, third]
        assert http.delete(f"{runs}/sampler_weights/second").is_success
        assert http.put(f"{runs}/sampler_weights/third/ttl", json={"ttl_seconds": 3600}).is_success
        assert listed() == [first, third]
        assert http.put(f"{runs}/sampler_weights/third/ttl", json={"ttl_seconds": 0}).is_success
        assert listed() == [first]
    with pytest.raises(tinker.NotFoundError, match=r"checkpoint .* not found for this API key"):
        service.create_sampling_client(model_path=third).result(TIMEOUT_S)
    after = logprobs(client)
    restored = service.create_training_client_from_state(first).result(TIMEOUT_S)  # without the optimizer
    assert logprobs(restored) == pytest.approx(after, abs=1e-6)
    step = restored.optim_step(types.AdamParams(learning_rate=0.0)).result(TIMEOUT_S)
    assert step.metrics is not None
    assert step.metrics["version"] == 1.0


def test_a_client_can_neither_use_nor_see_what_is_anothers(server: TinkerServer, service: tinker.ServiceClient) -> None:
    client = trained(service)
    saved = client.save_state("mine").result(TIMEOUT_S).path
    with (
        client_of(server, KEYS[1]) as stranger,
        pytest.raises(tinker.NotFoundError, match=r"model .* not found for this API key"),
    ):
        stranger.create_training_client_from_state(saved).result(TIMEOUT_S)
    listed = httpx.get(f"{server.url}/api/v1/training_runs", headers={"X-API-Key": KEYS[1]})
    assert client.get_info().model_id not in [run["training_run_id"] for run in listed.json()["training_runs"]]
    session, own = client.model_id.partition(":")[0], logprobs(client)
    for method, route, fields in (
        ("POST", "unload_model", {"model_id": client.model_id}),
        ("POST", "get_info", {"model_id": client.model_id}),
        ("POST", f"sessions/{session}/finish", {}),
        ("POST", "retrieve_future", {"request_id": f"{client.model_id}/1"}),
        ("DELETE", f"training_runs/{client.model_id}/checkpoints/weights/mine", None),
    ):
        asked = httpx.request(method, f"{server.url}/api/v1/{route}", headers={"X-API-Key": KEYS[1]}, json=fields)
        assert asked.status_code == httpx.codes.NOT_FOUND, route
    assert logprobs(client) == own
    unknown = httpx.post(f"{server.url}/api/v1/create_session", headers={"X-API-Key": "tml-unknown"}, content="{}")
    assert unknown.status_code == httpx.codes.UNAUTHORIZED


@pytest.mark.parametrize(
    ("loss", "given", "words"),
    [
        ("stable_reinforce", {"weights": [1.0] * 6}, "no published definition"),
        ("ppo", {"weights": [1.0] * 6}, "logprobs is missing"),
    ],
)
def test_a_wrong_request_fails_as_the_users(
    service: tinker.ServiceClient, loss: types.LossFnType, given: dict[str, list[float]], words: str
) -> None:
    client = trained(service)
    before = logprobs(client)
    with pytest.raises(tinker.RequestFailedError, match=words) as failed:
        client.forward_backward([datum(**given)], loss).result(TIMEOUT_S)
    assert failed.value.category is types.RequestErrorCategory.User
    assert logprobs(client) == pytest.approx(before, abs=1e-7)


def test_a_body_of_another_kind_or_size_is_refused(server: TinkerServer) -> None:
    zstd = {"content-encoding": "zstd"}
    bomb = zstandard.ZstdCompressor().compress(bytes(MOST_BYTES + 1))
    asked = [
        ("forward_backward", b"no frame", zstd, "expected a zstd frame"),
        ("forward_backward", bomb, zstd, f"got {MOST_BYTES + 1}"),
        ("weights_info", b"[]", {}, "body: "),
    ]
    for path, data, headers, why in asked:
        answer = httpx.post(f"{server.url}/api/v1/{path}", content=data, headers={"x-api-key": KEYS[0], **headers})
        assert (answer.status_code, why in answer.text) == (400, True), answer.text


def test_futures_resolve_after_a_kill_and_no_step_is_taken_twice(
    server: TinkerServer, service: tinker.ServiceClient
) -> None:
    steady, killed = trained(service), trained(service)
    wanted = stepped(steady, 6)
    losses = stepped(killed, 2)
    forward = killed.forward_backward([datum()], "cross_entropy")
    step = killed.optim_step(types.AdamParams(learning_rate=1e-2))
    server.kill()
    server.start_again()
    losses.append(forward.result(TIMEOUT_S).metrics["loss:sum"])
    step.result(TIMEOUT_S)
    losses += stepped(killed, 3)
    assert losses == pytest.approx(wanted, abs=1e-5)
    assert logprobs(killed) == pytest.approx(logprobs(steady), abs=1e-5)


def test_a_models_steps_are_a_run_that_can_be_viewed(server: TinkerServer, service: tinker.ServiceClient) -> None:
    client = trained(service)
    losses = stepped(client, 3)
    name = client.get_info().model_id.replace(":", "-")
    run = WatchedRun(server.folder / "runs" / name, name).records()
    assert [record["step"] for record in run.steps] == [1, 2, 3]
    assert run.column("loss") == pytest.approx(losses)
    assert run.column("tokens") == [6.0] * 3
    assert all(value > 0 for value in run.column("grad_norm"))
