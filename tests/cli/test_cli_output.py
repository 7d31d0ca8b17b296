"""What commands print of what others wrote."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks import MODULES
from command import shoal
from shoal.cli import BENCHES
from shoal.cli.output import stoppable
from shoal.cli.swarm import app
from shoal.errors import ChildDied

HOSTILE = "m\x1b[2J\r\nbanned \u202e"


def test_a_status_shows_what_a_server_said_on_one_line_and_without_control_characters(tmp_path: Path) -> None:
    (tmp_path / "swarm").mkdir()
    values = {"failure": HOSTILE, "needs": {HOSTILE: 0.5}, "model": "größe"}
    (tmp_path / "swarm" / "status.json").write_text(json.dumps(values))
    done = shoal("swarm", "status", str(tmp_path))
    failure, needs, model = done.stdout.splitlines()
    assert failure.split(maxsplit=1) == ["failure", r"m\x1b[2J\r\nbanned \u202e"]
    assert needs == r"needs.m\x1b[2J\r\nbanned \u202e  0.5"
    assert model.split() == ["model", "größe"]
    assert all(line.isprintable() for line in (failure, needs))
    assert json.loads(shoal("swarm", "status", str(tmp_path), "--json").stdout) == values


def test_a_status_that_is_cut_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "swarm").mkdir()
    (tmp_path / "swarm" / "status.json").write_text('{"failure": ')
    done = shoal("swarm", "status", str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "status.json: expected a node's status" in done.stderr


def test_a_mistake_is_told_without_control_characters(tmp_path: Path) -> None:
    done = shoal("swarm", "status", str(tmp_path / "\x1b[2J"))
    assert done.returncode == 2
    assert r"\x1b[2J" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("command", "option", "variable"), [("serve", "token", "SHOAL_SWARM_TOKEN"), ("join", "key", "SHOAL_MODEL_KEY")]
)
def test_a_secret_can_be_given_where_no_list_of_processes_shows_it(command: str, option: str, variable: str) -> None:
    group: Any = get_command(app)
    with CliRunner().isolation(env={variable: "secret"}):
        context = group.commands[command].make_context(command, ["config.toml"][: command == "join"])
    assert context.params[option] == "secret"


def test_the_benches_that_help_lists_are_those_that_there_are() -> None:
    assert list(BENCHES) == sorted(MODULES)


def test_the_help_of_what_takes_settings_says_so() -> None:
    for command in ("demo", "train", "eval"):
        assert "Any setting can be given" in shoal(command, "--help").stdout, command
    assert "Configuration whose tasks are asked" in shoal("judge", "serve", "--help").stdout  # brackets are no markup
    assert "15 to 17 minutes" in shoal("bench", "--help").stdout


def test_a_warning_has_no_colours_where_none_are_wanted() -> None:
    """A terminal, in which colours are otherwise."""

    def warned(**environment: str) -> bytes:
        ours, theirs = pty.openpty()
        script = "from shoal.cli.output import warn; warn('nothing was learned')"
        given = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        subprocess.run(
            [sys.executable, "-c", script], stderr=theirs, env={**given, "TERM": "xterm", **environment}, check=True
        )
        os.close(theirs)
        said = os.read(ours, 1 << 16)
        os.close(ours)
        return said

    assert b"\x1b[" in warned()
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert b"\x1b[" not in warned(**environment)


def test_the_time_of_a_node_s_status_is_a_date(tmp_path: Path) -> None:
    (tmp_path / "swarm").mkdir()
    (tmp_path / "swarm" / "status.json").write_text(json.dumps({"peer_id": "a", "time_s": 1.795e9}))
    shown = shoal("swarm", "status", str(tmp_path)).stdout
    assert re.search(r"^time_s +2026-11-\d\d \d\d:\d\d:\d\d$", shown, re.MULTILINE)
    assert json.loads(shoal("swarm", "status", str(tmp_path), "--json").stdout)["time_s"] == 1.795e9


def test_the_command_line_loads_only_what_a_task_s_worker_in_an_environment_of_its_own_has() -> None:
    script = (
        "import sys, shoal.cli, shoal.tasks.remote_worker; print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "pydantic", "zstandard", "cryptography", "nats", "starlette"} & set(loaded)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_lost_a_process_says_how_it_goes_on_unless_nothing_began(
    grouped: bool, begun: bool, tmp_path: Path
) -> None:
    if begun:
        (tmp_path / "resolved.toml").write_text("")
    error = ExceptionGroup("", [ChildDied("it died")]) if grouped else ChildDied("it died")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(type(error)) as caught, stoppable(str(tmp_path)):
        raise error
    signal.signal(signal.SIGTERM, before)
    advice = [f"go on with: shoal train {tmp_path / 'resolved.toml'} --resume"]
    assert getattr(caught.value, "__notes__", []) == (advice if begun else [])
