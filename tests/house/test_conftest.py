"""The tests' own ground: the tiny model, and skips under CI=true."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.model.renderer_loading import load_renderer
from shoal.types import Message, Role
from starts import starts

SKIPPING = """
import pytest

@pytest.mark.gpu
def test_of_a_gpu():
    pytest.skip("no GPU")

def test_of_anything_else():
    pytest.skip("not here")
"""
SKIPPED_WHOLE = "import pytest\npytest.skip('not here', allow_module_level=True)\n"


def outcomes(tmp_path: Path, source: str, ci: str) -> tuple[int, str]:
    """Exit code and last line of pytest run on a module with this repository's conftest."""
    (tmp_path / "test_skipping.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "conftest",
        "-p",
        "no:asyncio",
        "-p",
        "no:cacheprovider",
        ".",
    ]
    env = {**os.environ, "CI": ci, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("source", "ci", "code", "counts"),
    [
        (SKIPPING, "", 0, "2 skipped"),
        (SKIPPING, "true", 1, "1 failed, 1 skipped"),
        (SKIPPED_WHOLE, "true", 2, "1 error"),
    ],
)
def test_a_skip_fails_under_ci_unless_it_waits_for_a_gpu(
    source: str, ci: str, code: int, counts: str, tmp_path: Path
) -> None:
    returncode, last_line = outcomes(tmp_path, source, ci)
    assert (returncode, last_line.partition(" in ")[0]) == (code, counts)


def test_the_tiny_model_speaks_one_token_per_character(tiny_model_dir: Path) -> None:
    renderer = load_renderer(tiny_model_dir)
    ids = renderer.prompt_ids([Message(Role.USER, "2 + 2 =\n?")])
    assert len(ids) == len("2 + 2 =\n?") + 3  # the user's header, the end of the turn, the assistant's header
    assert renderer.text(ids) == "2 + 2 =\n?"


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        *(("train_runs", "start", True), ("browser", "Browser", True), ("command", "shoal", True)),
        *(
            ("conftest", "tiny_model_dir", False),
            ("session_sim", "Simulation", False),
            ("chat_templates", "renderer", False),
        ),
    ],
)
def test_what_a_definition_starts_is_found_in_the_sources(module: str, name: str, expected: bool) -> None:
    assert starts(module, name) == expected
