"""Engines of other processes join a run over TLS that listed none, share no folder with it, and may be killed."""

import json
from pathlib import Path

import pytest

from joining import TOKEN, certified, joining
from shoal.errors import ConfigError
from shoal.experience.audit import audit
from shoal.net.listening import CERTIFICATE_VARIABLE, KEY_VARIABLE, free_port, tls_files
from train_runs import events, start, wait_for_steps


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
