"""The commands of a model in an agent's process tree read no truth, write no reward, and change nothing outside."""

import asyncio
import contextlib
import ctypes
import json
import os
import shlex
import socket
import subprocess
import sys
import venv
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hostile.agents import ANSWER_FILE, ATTACKS, TRUTH, Attack
from played_agents import played
from shoal.rollout.agents import box
from shoal.rollout.agents.clients import Named, command_play
from shoal.rollout.agents.runner import Play
from shoal.types import Message, Reward, Role, Rollout, RolloutStatus, Task

ROOT = Path(__file__).parents[2]
TASK = Task("t/0", "t", (Message(Role.USER, "what is pi?"),), TRUTH, json.dumps({"truth": TRUTH, "agent": "seen"}))
AGENT = """
import json, os, subprocess, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = json.dumps({"model": "policy", "messages": task["messages"]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
said = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
command = json.load(open(sys.argv[1]))[said["choices"][0]["message"]["content"]]
subprocess.run(["bash", "-c", command], close_fds=False, timeout=30, stdout=2)
"""


class Found:
    """Implements `interfaces.Scorer`: 1 for an answer that holds the truth."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        return [Reward(float(str(task.answer) in answer)) for answer in answers]


ASKS = """import json, os, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "go"}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))"""
"""An agent's one question to the model."""


@dataclass(frozen=True, slots=True)
class World:
    """Targets outside of a rollout that hold the truth."""

    folder: Path
    kept: "ctypes.Array[ctypes.c_char]"
    datagrams: socket.socket

    @property
    def data(self) -> Path:
        return self.folder / "data" / self.name

    @property
    def agent(self) -> Path:
        return self.folder / "agent"

    @property
    def name(self) -> str:
        return f"data-{os.getpid()}.jsonl"

    @property
    def copies(self) -> list[Path]:
        return [self.data, Path("/dev/shm") / self.name, Path("/tmp") / self.name]

    def source(self, attack: Attack) -> str:
        targets = {
            "PYTHON": shlex.quote(sys.executable),
            "RUN": os.getpid(),
            "DATA": self.data,
            "FOLDER": self.data.parent,
            "NAME": self.name,
            "AGENT": self.agent,
            "SOCKET": self.folder / "socket",
            "DATAGRAMS": self.folder / "datagrams",
            "ADDRESS": ctypes.addressof(self.kept),
            "SIZE": len(self.kept),
        }
        source = attack.source
        for name, target in targets.items():
            source = source.replace(f"@{name}@", str(target))
        return source

    def harm(self) -> list[str]:
        """What was changed."""
        changed = [str(path) for path in self.copies if not path.is_file() or path.read_text() != TRUTH]
        changed += ["memory"] if self.kept.value != TRUTH.encode() else []
        with contextlib.suppress(BlockingIOError):
            changed.append(f"a datagram came: {self.datagrams.recv(100)!r}")
        listed = sorted(path.name for path in self.agent.iterdir())
        is_same = listed == ["agent.py", "commands.json"] and (self.agent / "agent.py").read_text() == AGENT
        return changed if is_same else [*changed, str(self.agent)]

    @contextlib.asynccontextmanager
    async def tells(self, play: Play) -> AsyncIterator[Play]:
        """The play, beside sockets of this machine that tell the truth."""

        async def tell(_: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            to.write(TRUTH.encode())
            to.close()

        named = await asyncio.start_unix_server(tell, self.folder / "socket")
        nameless = await asyncio.start_unix_server(tell, f"\0{self.name}")
        async with named, nameless:
            yield play


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    datagrams.bind(str(tmp_path / "datagrams"))
    made = World(tmp_path, ctypes.create_string_buffer(TRUTH.encode()), datagrams)
    made.data.parent.mkdir()
    made.agent.mkdir()
    (made.agent / "agent.py").write_text(AGENT)
    for path in made.copies:
        path.write_text(TRUTH)
    yield made
    datagrams.close()
    for path in made.copies:
        path.unlink(missing_ok=True)


def outcomes(world: World, attacks: Sequence[Attack], **settings: Any) -> dict[str, Rollout]:
    """The rollout of each attack: the model says its name, and the agent runs it."""
    commands = world.agent / "commands.json"
    commands.write_text(json.dumps({attack.name: world.source(attack) for attack in attacks}))
    named = Named([sys.executable, str(world.agent / "agent.py"), str(commands)], **settings)

    @contextlib.asynccontextmanager
    async def playing() -> AsyncIterator[Play]:
        async with command_play(named) as play, world.tells(play) as telling:
            yield telling

    said = [attack.name for attack in attacks]
    rollouts = played(playing(), *said, task=TASK, n=len(said), timeout_s=300, scoring=Found(), max_at_once=3)
    return {rollout.messages[-1].content: rollout for rollout in rollouts}


BOXED = """
import fcntl, os, socket
from shoal.sandbox import kernel, seccomp
file = os.open(os.__file__, os.O_RDONLY)
kernel.control(kernel.PR_SET_NO_NEW_PRIVS, 1)
kernel.install_filter(seccomp.agent_filter(kernel.MACHINE))
socket.socketpair()
socket.socketpair(type=socket.SOCK_SEQPACKET)
fcntl.fcntl(file, fcntl.F_GETLEASE)
def refused(call, *arguments):
    try: call(*arguments)
    except PermissionError as error: return error.errno == 1
print(all([
    refused(fcntl.fcntl, file, fcntl.F_SETLEASE, fcntl.F_RDLCK),
    refused(socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM),
    refused(socket.socketpair, socket.AF_UNIX, socket.SOCK_RAW),
    refused(socket.socket, socket.AF_UNIX),
]))
"""


@pytest.mark.skipif(bool(box.why_not()), reason=box.why_not())
def test_an_agent_takes_no_lease_and_has_pairs_of_streams_only() -> None:
    done = subprocess.run([sys.executable, "-c", BOXED], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_there_are_fifty_attacks_and_each_has_a_name() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 50
    assert len({attack.source for attack in ATTACKS}) == len(ATTACKS)


@pytest.mark.skipif(bool(box.why_not()), reason=box.why_not())
def test_no_command_of_a_model_moves_the_reward_that_the_task_s_scorer_gives(world: World) -> None:
    found = outcomes(world, ATTACKS, answer_file=ANSWER_FILE)
    assert found.keys() == {attack.name for attack in ATTACKS}
    assert {name: rollout.reward for name, rollout in found.items() if rollout.reward.value != 0} == {}
    failed = {name: rollout.reason for name, rollout in found.items() if rollout.status is not RolloutStatus.FINISHED}
    assert set(failed) <= {"parent_killed"}, failed
    assert world.harm() == []


def test_the_attacks_on_an_outcome_succeed_where_the_command_says_its_own_reward(world: World) -> None:
    bare = [attack for attack in ATTACKS if attack.bare]
    found = outcomes(world, bare, score="agent")
    assert {name: rollout.reward.value for name, rollout in found.items()} == {attack.name: 1000.0 for attack in bare}


@pytest.mark.skipif(bool(box.why_not()), reason=box.why_not())
@pytest.mark.parametrize(
    ("said", "command", "answer_file", "value"),
    [
        ("guess", f"echo {TRUTH} > {ANSWER_FILE}", ANSWER_FILE, 1.0),
        ("guess", f"echo {TRUTH} > {ANSWER_FILE}", "", 0.0),
        (TRUTH, f"echo guess > {ANSWER_FILE}", "", 1.0),
        (TRUTH, f"echo guess > {ANSWER_FILE}", ANSWER_FILE, 0.0),
        (TRUTH, "true", ANSWER_FILE, 0.0),
        ("guess", f"cd $HOME && mktemp && @PYTHON@ -c 'print(1)' && echo {TRUTH} > {ANSWER_FILE}", ANSWER_FILE, 1.0),
    ],
)
def test_what_a_command_left_or_said_last_is_scored(
    world: World, said: str, command: str, answer_file: str, value: float
) -> None:
    (rollout,) = outcomes(world, [Attack(said, command)], answer_file=answer_file).values()
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, value), rollout.reason


@pytest.mark.skipif(bool(box.why_not()), reason=box.why_not())
def test_the_starter_with_a_shell_is_scored_by_what_its_commands_left() -> None:
    task = Task("w/0", "w", (Message(Role.USER, "reverse river"),), "revir")
    script = str(ROOT / "examples" / "start" / "agent" / "shell.py")
    play = command_play(Named([sys.executable, script], answer_file="answer.txt"))
    (rollout,) = played(
        play, "```sh\necho river | rev > answer.txt\n```", "done", task=task, scoring=Found(), timeout_s=60
    )
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0), rollout.reason
    assert len(rollout.turns) == 2


@pytest.mark.skipif(bool(box.why_not()), reason=box.why_not())
def test_a_folder_of_imports_gives_its_modules_and_not_its_other_files(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("WORD = 'imported'")
    (tmp_path / "questions.jsonl").write_text("truth")
    (tmp_path / "work").mkdir()
    script = """import json, os, subprocess, sys
from shoal.rollout.agents import box, clients
command = [sys.executable, "-c", "import helper; print(helper.WORD); print(open(sys.argv[1]).read())", sys.argv[1]]
command[2] = "import sys; " + command[2]
words = json.dumps([box.readable(command[:3], [], dict(os.environ)), box.listed(command[:3]), sys.argv[2]])
subprocess.run([*clients.SUPERVISOR, str(os.getpid()), words, *command])"""
    words = [sys.executable, "-c", script, str(tmp_path / "questions.jsonl"), str(tmp_path / "work")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "imported\n"
    assert "PermissionError" in ended.stderr


@pytest.mark.skipif(bool(box.why_not()), reason=box.why_not())
def test_a_script_imports_what_lies_beside_it_and_reads_no_other_file_there(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text(TRUTH)
    (tmp_path / "tools.py").write_text("def shown(path):\n    return open(path).read()\n")
    script = tmp_path / "agent.py"
    script.write_text(
        "import os, pathlib, tools\n"
        f"try:\n    said = tools.shown({str(tmp_path / 'questions.jsonl')!r})\n"
        "except PermissionError:\n    said = 'closed'\n"
        f"pathlib.Path({ANSWER_FILE!r}).write_text(said)\n" + ASKS
    )
    play = command_play(Named([sys.executable, str(script)], answer_file=ANSWER_FILE))
    task = Task("w/0", "w", (Message(Role.USER, "go"),), "closed")
    (rollout,) = played(play, "done", task=task, scoring=Found(), timeout_s=60)
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0), rollout.reason


@pytest.mark.skipif(bool(box.why_not()), reason=box.why_not())
def test_a_program_that_is_a_link_into_its_package_runs_as_npm_and_pipx_lay_it(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "node_modules" / "agent"
    (package / "bin").mkdir(parents=True)
    (package / "package.json").write_text("{}")
    (package / "word").write_text("closed")
    (tmp_path / "bin").mkdir()
    program = package / "bin" / "cli"
    program.write_text(
        f"#!/bin/sh\ncat '{package}/word' > {ANSWER_FILE}\nexec {shlex.quote(sys.executable)} -c '{ASKS}'\n"
    )
    program.chmod(0o755)
    (tmp_path / "bin" / "agent").symlink_to(program)
    play = command_play(Named([str(tmp_path / "bin" / "agent")], answer_file=ANSWER_FILE))
    task = Task("w/0", "w", (Message(Role.USER, "go"),), "closed")
    (rollout,) = played(play, "done", task=task, scoring=Found(), timeout_s=60)
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0), rollout.reason


@pytest.mark.skipif(bool(box.why_not()), reason=box.why_not())
def test_the_python_of_another_environment_has_its_packages(tmp_path: Path) -> None:
    venv.create(tmp_path / "other", symlinks=True)
    (packages,) = (tmp_path / "other" / "lib").glob("python*/site-packages")
    (packages / "framework.py").write_text(f"import pathlib\npathlib.Path({ANSWER_FILE!r}).write_text('closed')\n")
    script = tmp_path / "agent.py"
    script.write_text("import framework" + AGENT.partition("command =")[0])
    play = command_play(Named([str(tmp_path / "other" / "bin" / "python"), str(script)], answer_file=ANSWER_FILE))
    task = Task("w/0", "w", (Message(Role.USER, "go"),), "closed")
    (rollout,) = played(play, "done", task=task, scoring=Found(), timeout_s=60)
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0), rollout.reason
