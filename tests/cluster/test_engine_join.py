"""Engines of other processes join a run over TLS that listed none, share no folder with it, and may be killed."""

import json
import sys
from pathlib import Path

import pytest

from conftest import save_tiny_tokenizer
from engine_models import saved
from joining import TOKEN, certified, joining
from shoal.errors import ConfigError
from shoal.experience.audit import audit
from shoal.experience.log import read, read_step
from shoal.net.listening import CERTIFICATE_VARIABLE, KEY_VARIABLE, free_port, tls_files
from train_runs import events, start, wait_for_steps

EXPERTS = {"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24}


@pytest.mark.timeout(900)
def test_a_run_goes_on_while_engines_that_nobody_listed_come_and_are_killed(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    port, trusted = free_port(), certified(tmp_path / "tls")
    engine = ("engine", "join", f"https://127.0.0.1:{port}", "--threads=1")
    run = start(
        tmp_path,
        tiny_model_dir,
        "--engine.count=0",
        f"--cluster.listen=127.0.0.1:{port}",
        "--json",
        SHOAL_RUN_TOKEN=TOKEN,
        **trusted,
    )
    # Before any engine has joined: until then the run cannot end, and these two are told why they cannot join.
    stranger = joining(tmp_path / "stranger", *engine, token="another", **trusted)
    careful = joining(tmp_path / "careful", *engine, SSL_CERT_FILE="")
    assert stranger.wait(300) == 2
    assert "wants its token" in (tmp_path / "stranger" / "output").read_text()
    assert careful.wait(300) == 2
    assert "SSL_CERT_FILE names the authority" in (tmp_path / "careful" / "output").read_text()
    first = joining(tmp_path / "first", *engine, **trusted)
    wait_for_steps(tmp_path / "run", 3, run)
    second = joining(tmp_path / "second", *engine, **trusted)
    assert run.poll() is None, "this test wants more steps"
    first.kill()
    first.wait(60)
    out, err = run.communicate(timeout=600)
    assert run.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["steps"] == 40
    report = audit(tmp_path / "run")
    assert report.ok, report.sentences()
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    states = [(one["role"], one["state"]) for one in told if one.get("name") == "role"]
    assert states[:1] == [("engine-joined-1", "joined")]
    assert ("engine-joined-1", "left") in states
    second.terminate()
    assert second.wait(60) == 0
    assert (tmp_path / "run" / "run.token").read_text() == TOKEN
    assert (tmp_path / "run" / "run.token").stat().st_mode & 0o077 == 0
    assert "roles" in events(tmp_path / "run")


@pytest.mark.timeout(600)
def test_an_engine_that_joins_tells_the_experts_of_its_tokens_or_is_refused(tmp_path: Path) -> None:
    model = saved("Qwen3Moe", tmp_path / "model", num_experts=16, num_experts_per_tok=2, **EXPERTS)
    save_tiny_tokenizer(model)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = ("--engine.count=0", f"--cluster.listen=127.0.0.1:{port}", "--train.router_replay=true")
    more = ("--train.steps=3", "--asynchrony.max_staleness=0", "--json")
    run = start(tmp_path, model, *settings, *more, SHOAL_RUN_TOKEN=TOKEN)
    server = (sys.executable, "-m", "shoal.engine.server.http_server", "--model={model}", "--port={port}")
    silent = joining(tmp_path / "silent", "engine", "join", url, "--", *server, SHOAL_ENGINE_TOKEN="x")
    assert silent.wait(300) == 2
    assert "does not report the experts of its tokens" in (tmp_path / "silent" / "output").read_text()
    engine = joining(tmp_path / "engine", "engine", "join", url, "--threads=1")
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["steps"] == 3
    report = audit(tmp_path / "run")
    assert report.ok, report.sentences()
    (group, *_) = read(tmp_path / "run", lambda connection: read_step(connection, 0))
    assert all(rollout.turns[0].completion.routing for rollout in group.rollouts)
    engine.terminate()
    assert engine.wait(60) == 0


def test_a_run_without_engines_needs_an_address_where_they_could_join(tmp_path: Path) -> None:
    from shoal.config import parse

    with pytest.raises(ConfigError, match=r"engine.count: expected at least 1 without cluster.listen"):
        parse({"tasks": [{"name": "chain_sum"}], "engine": {"count": 0}})
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        parse({"tasks": [{"name": "chain_sum"}], "cluster": {"listen": "nowhere"}})


@pytest.mark.parametrize("wrong", [{KEY_VARIABLE: ""}, {CERTIFICATE_VARIABLE: "key.pem"}])
def test_a_certificate_without_its_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {**certified(tmp_path), **wrong}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="SHOAL_TLS_CERT, SHOAL_TLS_KEY: expected the files of a certificate and its"):
        tls_files()
