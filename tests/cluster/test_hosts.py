"""Hosts in namespaces, on which the cluster's tests run."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.hosts import UNSHARED, can_isolate

SCRIPT = """
import tempfile
import time
from pathlib import Path

from benchmarks import hosts

hosts.Namespaces.bridge()
there = hosts.Namespaces(lambda address: ["sh", "-c", "touch up; exec sleep 60"], first_user=0)
name = there.add()
while not there.path_of(name, Path(tempfile.gettempdir()) / "up").exists():
    assert Path(f"/proc/{there._inits[name]}").exists(), "the host has ended"
    time.sleep(0.05)
assert there.path_of(name, Path(hosts.__file__)).exists()
there.kill(name)
"""


@pytest.mark.timeout(120)
def test_a_host_has_the_tree_of_a_clone_whose_path_has_a_space() -> None:
    if not can_isolate():
        pytest.skip(f"needs root, for network and mount namespaces of its hosts; this is user {os.getuid()}")
    with tempfile.TemporaryDirectory(prefix="a clone ") as clone:
        os.chmod(clone, 0o755)  # a folder that other users may not enter would be hidden
        copied = Path(__file__).parents[2] / "benchmarks"
        shutil.copytree(copied, Path(clone) / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
        command = [*UNSHARED, sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, cwd=clone, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
