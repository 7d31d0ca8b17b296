"""Fixtures: a cache of trees and forks, and a small task in a tree. A module names this one in `pytest_plugins`."""

import shutil
import subprocess
from pathlib import Path

import pytest

from shoal.workspace.judge import HiddenTests
from shoal.workspace.packages import installed
from shoal.workspace.tree import Tree, tree_of

RED, GREEN = "tests/test_sums.py::test_it_adds", "tests/test_sums.py::test_it_is_callable"


@pytest.fixture(scope="session")
def workspace_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def own_cache(workspace_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(workspace_cache))


@pytest.fixture
def source(tmp_path: Path, own_cache: None) -> Path:
    folder = tmp_path / "source"
    (folder / "tests").mkdir(parents=True)
    (folder / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "tests" / "test_sums.py").write_text(
        "from sums import add\n\n\ndef test_it_adds():\n    assert add(1, 2) == 3\n\n\n"
        "def test_it_is_callable():\n    assert callable(add)\n"
    )
    return folder


@pytest.fixture
def tree(source: Path) -> Tree:
    return tree_of(source)


@pytest.fixture
def hidden() -> HiddenTests:
    command = ("python", "-m", "pytest", "-q", "tests/test_sums.py")
    return HiddenTests(command, red=(RED,), green=(GREEN,), restored=("tests",))


@pytest.fixture
def packages(own_cache: None) -> tuple[Path, ...]:
    return (installed("pytest"),)


@pytest.fixture
def image_root(tmp_path: Path, own_cache: None) -> Path:
    """A root of a system with bash, env, and a python3 that prints its words, once of the image and once of a Conda.

    As in most images /bin and /lib are links, and /dev is empty.
    """
    folder = tmp_path / "image"
    for name in ("bin", "lib", "lib64"):
        (folder / "usr" / name).mkdir(parents=True)
        (folder / name).symlink_to(f"usr/{name}")
    (folder / "dev").mkdir()
    for name in ("/bin/bash", "/usr/bin/env"):
        listed = subprocess.run(["ldd", name], check=True, capture_output=True, text=True).stdout.split()
        for path in (name, *(word for word in listed if word.startswith("/"))):
            (folder / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / path[1:])
    for place in ("usr/bin", "opt/miniconda3/envs/testbed/bin"):
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / "python3").write_text(f"#!/bin/bash\necho {place} $*\n")
        (folder / place / "python3").chmod(0o755)
    (folder / "etc").mkdir()
    return folder
