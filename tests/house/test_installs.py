"""The walks of `make installs` take their lines from the pages, and a line that fails is a stumble."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from installs import STARTERS, WALKS, Stumble, Walk, cut, readme_lines, script, walk_lines  # noqa: E402


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.name)
def test_each_walk_has_lines_that_its_page_prints(walk: Walk) -> None:
    assert walk.lines()


def test_the_readme_says_how_to_install_without_make() -> None:
    assert readme_lines()[0].startswith("python3 -m venv")


def test_every_starter_and_every_page_of_the_tutorial_is_walked() -> None:
    pages = {walk.page for walk in WALKS}
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/tutorial").glob("*.md")} <= pages
    assert {path.name for path in (ROOT / "examples/start").iterdir()} == set(STARTERS)


def test_a_line_that_fails_is_a_stumble_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(Stumble, match="no such thing"):
        walk_lines(["true", "echo 'no such thing' && false", "true"], tmp_path, dict(os.environ), tmp_path / "log")


def test_a_server_that_ends_before_it_has_an_address_is_a_stumble(tmp_path: Path) -> None:
    (tmp_path / "shoal").write_text("#!/bin/sh\necho 'no port'\n")
    (tmp_path / "shoal").chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with pytest.raises(Stumble, match="no port"):
        walk_lines(["shoal view"], tmp_path, variables, tmp_path / "log")


def test_settings_of_a_page_get_the_sizes_of_the_walk() -> None:
    (walk,) = [walk for walk in WALKS if walk.sizes]
    assert "gpus" not in walk.settings()
    with pytest.raises(Stumble, match="no longer has `rewards = 9`"):
        replace(walk, sizes=(("rewards = 9", ""),)).settings()


def test_every_extra_that_a_page_names_is_walked() -> None:
    """Trackers, which `make trackers` runs, apart."""
    named = {name for page in ROOT.glob("docs/**/*.md") for name in re.findall(r"'shoal\[(\w+)\]'", page.read_text())}
    walked = {name for walk in WALKS for line in walk.lines() for name in re.findall(r"'shoal\[(\w+)\]'", line)}
    assert named - walked == {"wandb"}


def test_only_training_and_sets_of_tasks_are_cut() -> None:
    assert cut("shoal train run.toml --dry-run") == "shoal train run.toml --dry-run"
    assert cut("shoal train run.toml &").endswith(" &")
    assert cut("shoal train --resume first --train.steps=200") == "shoal train --resume first --train.steps=5"
    assert script(["shoal runs"]).endswith("shoal runs\n")
