"""What `shoal init` writes runs as it is, and the tutorial's folders are these."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command import shoal
from shoal.config import load, to_toml
from shoal.errors import RunDirError
from shoal.experience.counts import task_counts
from shoal.run.commands.starters import starter_folder, write_starter

ROOT = Path(__file__).parents[2]
ALONE = ("first", "data", "reward", "agent", "trl")
"""Starters whose runs need no other process."""
SHORT = ("--train.steps=3", "--eval.questions=6", "--eval.every_steps=0")


def test_init_names_the_files_and_the_next_commands(tmp_path: Path) -> None:
    made = shoal("init", "data", "mine", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("mine/README.md\nmine/questions.jsonl\nmine/run.toml\n")
    assert made.stdout.endswith("  cd mine\n  shoal train run.toml --dry-run\n  shoal train run.toml\n")


def test_init_names_the_source_of_this_installation_for_another_one(tmp_path: Path) -> None:
    made = shoal("init", "verifiers", "mine", cwd=tmp_path)
    (line,) = [line for line in made.stdout.splitlines() if "--no-deps" in line]
    folder = Path(line.rpartition(" ")[2])
    assert (folder / "pyproject.toml").is_file()
    assert line.strip() in (tmp_path / "mine" / "README.md").read_text()


@pytest.mark.parametrize("kind", ALONE)
def test_a_dry_run_of_a_starter_passes_from_any_folder(kind: str, tmp_path: Path) -> None:
    write_starter(kind, tmp_path / "mine")
    done = shoal("train", "mine/run.toml", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_tasks_of_all_starters_train_in_one_run(tmp_path: Path) -> None:
    """One run for five: what differs between them are their tasks."""
    tasks = []
    for kind in ALONE:
        write_starter(kind, tmp_path / kind)
        (task,) = load(tmp_path / kind / "run.toml").tasks
        tasks.append(task if kind == "first" else task.model_copy(update={"name": f"words of {kind}"}))
    whole = load(tmp_path / "first" / "run.toml").model_copy(
        update={"tasks": tasks, "run_dir": str(tmp_path / "runs" / "all")}
    )
    (tmp_path / "all.toml").write_text(to_toml(whole))
    done = shoal("train", str(tmp_path / "all.toml"), *SHORT, cwd=tmp_path)
    said = done.stderr
    assert done.returncode == 0, said
    run = tmp_path / "runs" / "all"
    assert f"model: {run}/model" in said
    assert "sampled answers before and after training:" in said
    assert (run / "report.html").is_file()
    counts = task_counts(run)
    assert {name for name, one in counts.items() if one.finished} == {task.name for task in tasks}
    assert sum(one.failed.total() for one in counts.values()) == 0


def test_the_starter_of_verifiers_is_a_task_for_a_process_of_its_own() -> None:
    """Its run wants verifiers 0.4, which wants other releases of packages; `make adapters` tries such a taskset."""
    folder = starter_folder("verifiers")
    (task,) = load(folder / "run.toml").tasks
    assert (task.name, task.service, task.path) == ("words", "remote", "127.0.0.1:8200")
    for file in folder.glob("*.py"):
        ast.parse(file.read_text())


def test_a_folder_with_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunDirError, match="exists already; name another folder: shoal init data FOLDER"):
        write_starter("data", tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").rglob("*.toml")), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_every_example_s_files_are_beside_its_configuration(path: Path) -> None:
    for task in load(path).tasks:
        if task.service == "jsonl":
            assert Path(str(task.path)).is_file()


def test_the_wheel_has_starters_metadata_and_no_link_that_leads_nowhere(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    unpack = [sys.executable, "-m", "zipfile", "-e"]
    for home, name in (("", "plain"), ("https://example.org/shoal", "linked")):
        subprocess.run(build, cwd=ROOT, env={**os.environ, "SHOAL_HOME_URL": home}, capture_output=True, check=True)
        (wheel,) = tmp_path.glob("*.whl")
        subprocess.run([*unpack, str(wheel), str(tmp_path / name)], check=True)
        wheel.unlink()
    (plain,), (linked,) = ((tmp_path / name).glob("shoal-*.dist-info/METADATA") for name in ("plain", "linked"))
    metadata, absolute = plain.read_text(), linked.read_text()
    assert "Author: The Shoal authors" in metadata
    assert metadata.count("\nClassifier: ") >= 8
    assert "](docs/" not in metadata + absolute
    assert "Project-URL: Homepage, https://example.org/shoal" in absolute
    assert "](https://example.org/shoal/docs/guides/hosts.md)" in absolute
    package = tmp_path / "plain" / "shoal"
    for kind in (*ALONE, "verifiers", "swarm"):
        assert (package / "starters" / kind / "run.toml").is_file()
    for file in ("observe/view/static/view.js", "observe/view/templates/base.html", "net/look.css"):
        assert (package / file).is_file(), "the page of an installed wheel needs no network"
