"""`shoal workspace run`, `shell` and `mcp` work on real trees and say what changed."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.workspace.changes import MOST_CHARACTERS, MOST_FILES, MOST_OF_ALL, Worklog, difference, files_of
from shoal.workspace.fork import ForkKind, fork, fork_kind
from shoal.workspace.tree import Tree, tree_of

pytest_plugins = ("small_workspaces",)
MENDED = "--- a/sums.py\n+++ b/sums.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"


def shoal(*words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal.cli", "workspace", *words]
    return subprocess.run(command, input=typed, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def tasks(source: Path) -> Path:
    task = {
        "id": "sums",
        "problem": "Mend it.",
        "tree": "source",
        "solution": MENDED,
        "command": ["python", "-m", "pytest", "-q", "tests/test_sums.py"],
        "red": ["tests/test_sums.py::test_it_adds"],
        "restored": ["tests"],
    }
    (source.parent / "tasks.jsonl").write_text(json.dumps(task))
    (source.parent / "commands").write_text("cd tests\nls\nsed -i 's/a - b/a + b/' ../sums.py\n")
    return source.parent


@pytest.mark.parametrize(("agent", "reward"), [("nothing", 0.0), ("solution", 1.0), ("commands", 1.0)])
def test_a_task_is_played_by_hand(agent: str, reward: float, tasks: Path) -> None:
    named = str(tasks / agent) if agent == "commands" else agent
    done = shoal("run", str(tasks / "tasks.jsonl"), "sums", "--agent", named, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["reward"] == reward
    if agent == "commands":
        assert [turn["output"] for turn in report["session"]] == ["", "test_sums.py\n", ""]
        assert [turn["difference"] for turn in report["session"]] == ["", "", MENDED]
    refused = shoal("run", str(tasks / "tasks.jsonl"), "other")
    assert refused.returncode == 2
    assert "expected the task 'other'" in refused.stderr


def test_a_person_works_in_a_tree_and_sees_the_difference(source: Path) -> None:
    done = shoal("shell", str(source), typed="cd tests\npwd\nsed -i 's/a - b/a + b/' ../sums.py\n")
    assert done.returncode == 0, done.stderr
    assert "/workspace/tests" in done.stdout
    assert done.stdout.endswith(MENDED)
    assert (source / "sums.py").read_text().endswith("a - b\n")


@pytest.mark.parametrize("kind", [ForkKind.OVERLAY, ForkKind.COPY])
def test_a_difference_has_new_changed_and_removed_files_and_follows_no_link(kind: ForkKind, tree: Tree) -> None:
    if kind is ForkKind.OVERLAY and fork_kind() is not kind:
        pytest.skip(f"this machine forks by {fork_kind()}")
    with fork(tree, kind) as workspace:
        asyncio.run(workspace.run("rm -r tests; echo new > new; ln -s /etc/passwd link; touch sums.py; mkfifo pipe"))
        first = files_of(workspace)
        assert {"new": "new\n", "link": "link to /etc/passwd\n", "tests/test_sums.py": ""}.items() <= first.items()
        assert "sums.py" not in first
        asyncio.run(workspace.run("echo more >> new"))
        assert difference(workspace, first, files_of(workspace)) == "--- a/new\n+++ b/new\n@@ -1 +1,2 @@\n new\n+more\n"


def test_a_difference_from_a_snapshot_is_from_its_newest_files(tree: Tree) -> None:
    if fork_kind() is not ForkKind.OVERLAY:
        pytest.skip(f"this machine forks by {fork_kind()}")
    with fork(tree) as first:
        asyncio.run(first.run("sed -i 's/a - b/a * b/' sums.py; rm -r tests; mkdir tests; echo new > tests/new"))
        assert files_of(first)["tests/test_sums.py"] == ""
        planted = first.snapshot()
    with fork(planted) as second:
        asyncio.run(second.run("sed -i 's/a [*] b/a - b/' sums.py; rm tests/new; cat tests/test_sums.py"))
        assert files_of(second) == {"sums.py": "def add(a, b):\n    return a - b\n", "tests/new": ""}
        wanted = MENDED.replace("a - b", "a * b").replace("a + b", "a - b")
        assert Worklog(second).difference() == f"{wanted}--- a/tests/new\n+++ b/tests/new\n@@ -1 +0,0 @@\n-new\n"


def test_a_hostile_workspace_is_described_within_bounds(tree: Tree, tmp_path: Path) -> None:
    hostile = (
        "touch $'\\xff'; for i in $(seq 3000); do echo $i > many$i; done; seq 1000000 > long; "
        "mkdir real; ln -s /etc linked; yes | head -c 5000000 > big"
    )
    with fork(tree) as workspace:
        asyncio.run(workspace.run(hostile))
        found = Worklog(workspace).difference()
        assert len(found) < 2 * MOST_CHARACTERS
        assert len(files_of(workspace)) <= MOST_FILES
    with fork(tree) as workspace:
        asyncio.run(workspace.run("for i in $(seq 30); do truncate -s 199999 sparse$i; done"))
        kept = files_of(workspace)
        assert len(kept) == 30
        assert sum(map(len, kept.values())) < 1.01 * MOST_OF_ALL
        assert "199999 characters\n" in kept.values()
    for name in ("linked", "secret"):
        (tmp_path / name).mkdir()
    (tmp_path / "secret" / "key").write_text("hidden\n")
    (tmp_path / "linked" / "link").symlink_to(tmp_path / "secret")
    with fork(tree_of(tmp_path / "linked")) as workspace:
        asyncio.run(workspace.run("rm link; mkdir link; echo mine > link/key"))
        assert "+mine" in (found := Worklog(workspace).difference())
        assert "hidden" not in found
