"""Engines and the trainer of a Tinker server join it from elsewhere, and may be killed; no step is taken twice."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import tinker
from tinker import types

from joining import TOKEN, joining
from shoal.errors import ConfigError
from shoal.net.client import TOKEN_VARIABLE
from shoal.net.listening import free_port
from shoal.run.commands.serve import cluster_config
from shoal.tinker.models_trainer import ServerSettings
from tinker_clients import TIMEOUT_S, TOKENS, client_of, datum, logprobs, stepped, trained
from tinker_server import KEYS, tinker_serving
from train_runs import children

ENGINE, WORKER = "shoal.engine.server.http_server", "shoal.trainer.worker"
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def sampled_as_trained(client: tinker.TrainingClient) -> None:
    """Saves the client's weights for engines, and checks that they sample with its logprobs."""
    sampler = client.save_weights_and_get_sampling_client().result(TIMEOUT_S)
    params = types.SamplingParams(max_tokens=6, seed=3)
    for sequence in sampler.sample(types.ModelInput.from_ints(TOKENS[:2]), 2, params).result(TIMEOUT_S).sequences:
        own = logprobs(client, [*TOKENS[:2], *sequence.tokens])[1:]
        assert list(sequence.logprobs or []) == pytest.approx(own, abs=1e-4)


@pytest.mark.timeout(900)
def test_engines_and_the_trainer_join_a_server_and_are_killed(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    port = free_port()
    engine = ("engine", "join", f"http://127.0.0.1:{port}", "--threads=1")
    trainer = ("trainer", "join", f"http://127.0.0.1:{port}", "--threads=1")
    cluster = ("--engines=0", f"--cluster.listen=127.0.0.1:{port}", "--cluster.trainer.hosts=1")
    with ExitStack() as stack:
        stack.callback(lambda: [role.kill() for role in roles])
        roles = [joining(tmp_path / name, *words) for name, words in (("a", engine), ("b", engine), ("c", trainer))]
        server = stack.enter_context(tinker_serving(tiny_model_dir, tmp_path / "server", *cluster))
        with client_of(server, KEYS[0]) as service:
            steady, killed = trained(service), trained(service)
            wanted = stepped(steady, 6)
            losses = stepped(killed, 2)
            sampled_as_trained(killed)
            assert [*children(server.process, ENGINE), *children(server.process, WORKER)] == []
            roles.append(joining(tmp_path / "d", *trainer))
            forward = killed.forward_backward([datum()], "cross_entropy")
            step = killed.optim_step(types.AdamParams(learning_rate=1e-2))
            roles[2].kill()
            losses.append(forward.result(TIMEOUT_S).metrics["loss:sum"])
            step.result(TIMEOUT_S)
            roles[0].kill()
            sampled_as_trained(killed)
            server.kill()
            server.start_again()
            losses += stepped(killed, 3)
            assert losses == pytest.approx(wanted, abs=1e-5)
            assert logprobs(killed) == pytest.approx(logprobs(steady), abs=1e-5)
            sampled_as_trained(steady)
        for process in (roles[1], roles[3]):
            process.terminate()
            assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("bases", "engines", "given", "complaint"),
    [
        (1, 1, ["--train.lr=1"], "--train.lr=1: expected an option of this command or a setting of .cluster."),
        (1, 0, [], r"engine.count: expected at least 1 without cluster.listen"),
        (2, 1, ["--cluster.listen=127.0.0.1:0"], "--model: expected one with cluster.listen, .* got 2"),
        (1, 1, ["--cluster.listen=127.0.0.1:0", "--cluster.trainer.hosts=2"], "cluster.trainer: expected one rank"),
        (
            *(1, 1, ["--cluster.listen=127.0.0.1:7", "--cluster.address=auto", '--cluster.engines.command=["vllm"]']),
            "cluster.engines.command: expected none",
        ),
    ],
)
def test_a_cluster_that_cannot_serve_is_refused(bases: int, engines: int, given: list[str], complaint: str) -> None:
    settings = ServerSettings({str(number): Path() for number in range(bases)}, Path("nowhere"), engines)
    with pytest.raises(ConfigError, match=complaint):
        cluster_config(settings, given)


@pytest.mark.cookbook
@pytest.mark.skipif(not os.environ.get("SHOAL_COOKBOOK"), reason="run by make test-tinker: Ray takes long to start")
@pytest.mark.timeout(600)
def test_ray_starts_an_engine_and_the_trainer_of_a_server(tmp_path: Path, tiny_model_dir: Path) -> None:
    cluster = (f"--cluster.listen=127.0.0.1:{free_port()}", "--cluster.address=local", "--cluster.trainer.hosts=1")
    arguments = ("--engines=0", *cluster, "--cluster.engines.count=1")
    with (
        tinker_serving(tiny_model_dir, tmp_path, *arguments) as server,
        client_of(server, KEYS[0]) as service,
    ):
        client = trained(service)
        losses = stepped(client, 3)
        assert losses[-1] < losses[0]
        sampled_as_trained(client)
    logs = tmp_path / "logs"
    for name in ("ray-engine-0", "ray-rank-0"):
        assert "joined http://127.0.0.1" in (logs / f"{name}.log").read_text()
