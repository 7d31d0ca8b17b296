"""The starter of a swarm, as a user begins it: two nodes that train, and a member that only answers."""

import subprocess
import sys
from pathlib import Path

from command import shoal
from left_processes import ended_with_its_test
from shoal.experience.audit import audit
from shoal.run.commands.starters import write_starter

SHORT = ("--train.steps=8", "--eval.questions=6", "--eval.every_steps=0")


def started(*words: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shoal.cli", *words]
    return ended_with_its_test(
        subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    )


def test_the_starter_of_a_swarm_has_two_nodes_that_meet(tmp_path: Path) -> None:
    folder = tmp_path / "swarm"
    write_starter("swarm", folder)
    server = started("swarm", "serve", "--port", "0", cwd=folder)
    assert server.stdout is not None
    url = server.stdout.readline().partition('["')[2].partition('"]')[0]
    command = ("train", "run.toml", f'--swarm.servers=["{url}"]', *SHORT)
    first = started(*command, "--run_dir=runs/node-a", "--seed=0", cwd=folder)
    second = shoal(*command, "--run_dir=runs/node-b", "--seed=1", cwd=folder)
    _, complaint = first.communicate(timeout=200)
    assert first.returncode == 0, complaint
    assert second.returncode == 0, second.stderr
    for name in ("node-a", "node-b"):
        report = audit(folder / "runs" / name)
        assert report.ok, report.sentences()
    joined = shoal("swarm", "join", "run.toml", f"--server={url}", "--rule=truth", "--groups=1", cwd=folder)
    assert joined.returncode == 0, joined.stderr
    assert f" answers for {url}; Ctrl-C ends" in joined.stderr
    assert (folder / "runs" / "node-join" / "swarm" / "status.json").is_file(), "a run of its configuration can begin"
    status = shoal("swarm", "status", "node-a", cwd=folder)
    assert status.returncode == 0, status.stderr
    assert "shared" in status.stdout
    server.terminate()
    server.communicate(timeout=60)
