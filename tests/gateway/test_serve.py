"""`shoal serve` as a user starts it: a real engine behind the gateway, and a real client."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from command import shoal


def test_beyond_loopback_serve_wants_its_key_of_every_client(tiny_model_dir: Path) -> None:
    """An address of this machine that is not written as one of loopback."""
    command = [str(Path(sys.executable).with_name("shoal")), "serve", "--model", str(tiny_model_dir), "--port", "0"]
    key = {**os.environ, "SHOAL_ADMIN_KEY": "secret"}
    with subprocess.Popen([*command, "--host", "127.1"], stdout=subprocess.PIPE, text=True, env=key) as served:
        try:
            assert served.stdout is not None
            url = served.stdout.readline().strip()
            assert "-H 'Authorization: Bearer secret'" in served.stdout.readline()
            with openai.OpenAI(base_url=url, api_key="secret") as client:
                assert len(client.models.list().data) == 1
            with openai.OpenAI(base_url=url, api_key="-") as stranger, pytest.raises(openai.AuthenticationError):
                stranger.models.list()
        finally:
            served.send_signal(signal.SIGINT)
        assert served.wait(timeout=60) == 0


def test_serve_says_what_is_wrong_with_a_model() -> None:
    done = shoal("serve", "--model", "./nothing-here")
    assert (done.returncode, done.stdout) == (2, "")
    assert "does not exist" in done.stderr
