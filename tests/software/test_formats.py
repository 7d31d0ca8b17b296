"""Tasks of other projects' formats: read unchanged, solved by their oracle, and not by doing nothing."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from faulty_package import SOURCE, written
from shoal.errors import TaskError
from shoal.software.checking import checked
from shoal.software.formats import changed, oracle, recipe_of, reversed_patch, tasks_of
from shoal.software.images import DockerLike, image_tree
from shoal.workspace.changes import difference_of
from shoal.workspace.reports import ReportKind
from shoal.workspace.task import opened
from shoal.workspace.tree import prepare_as, tree_of

pytest_plugins = ("small_workspaces",)
HELLO = 'echo "Hello, world!" > hello.txt\n'
WRITES_REWARD = """#!/bin/bash
mkdir -p /logs/verifier
if [ "$(cat /app/hello.txt)" = "Hello, world!" ]; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""
DOWNLOADS_PYTEST = """#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.7/install.sh | sh
if uvx \\
  --with pytest==8.4.1 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
OUTPUTS = """from pathlib import Path


def test_the_file_is_there():
    assert Path("/app/hello.txt").exists()


def test_the_file_greets():
    assert Path("/app/hello.txt").read_text().strip() == "Hello, world!"
"""


def harbor(folder: Path, test: str = WRITES_REWARD, dockerfile: str = "FROM ubuntu:24.04\n\nWORKDIR /app") -> Path:
    """A task in the layout that `harbor init` writes."""
    for name in ("environment", "solution", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text('schema_version = "1.4"\n\n[verifier]\ntimeout_sec = 60.0\n')
    (folder / "instruction.md").write_text("Write hello.txt with the text Hello, world!")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "solution" / "solve.sh").write_text(f"#!/bin/bash\n\n{HELLO}")
    (folder / "tests" / "test.sh").write_text(test)
    if "pytest" in test:
        (folder / "tests" / "test_outputs.py").write_text(OUTPUTS)
    return folder


def terminal_bench(folder: Path, *, typed: bool = False) -> Path:
    """A task in the layout of those that terminal-bench 0.2.9 brings; its base image has the folder /app."""
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text("instruction: |-\n  Write hello.txt.\nmax_test_timeout_sec: 60.0\ntags: [a]\n")
    (folder / "Dockerfile").write_text(
        "# note\nFROM x/t-bench/python-3-13:1\n\nCOPY given.txt /app\nCOPY given.txt more.txt .\n"
    )
    (folder / "docker-compose.yaml").write_text("services:\n  client:\n    image: ${IMAGE}\n")
    for name in ("given", "more"):
        (folder / f"{name}.txt").write_text("Hello, world!\n")
    (folder / "run-tests.sh").write_text(
        "#!/bin/bash\nsource $TEST_DIR/setup-uv-pytest.sh\nbash $TEST_DIR/run-uv-pytest.sh\n"
    )
    (folder / "tests" / "setup-uv-pytest.sh").write_text(
        "apt-get install -y curl\n# pip install foo\necho 'pip install failed'\nuv init\n"
        "python -m pip install -U pip -r more.txt --target out 'h11>=0.1' \\\n  \"idna # and more\n"
        "uv add pytest==8.4.1 numpy==2.3.1 --index https://x.y\n"
    )
    (folder / "tests" / "run-uv-pytest.sh").write_text("uv run pytest $TEST_DIR/test_outputs.py -rA\n")
    (folder / "tests" / "test_outputs.py").write_text(f"import numpy\n{OUTPUTS}")
    if typed:
        step = "- command: {}\n  min_timeout_sec: 0.1\n  block: true\n  append_enter: true\n\n"
        (folder / "solution.yaml").write_text("# note\n" + step.format("ls") + step.format("cp given.txt hello.txt"))
    else:
        (folder / "solution.sh").write_text(HELLO)
    return folder


@pytest.mark.parametrize("form", ["reward", "pytest", "terminal-bench", "terminal-bench, typed"])
def test_the_oracle_gets_full_marks_and_doing_nothing_gets_none(tmp_path: Path, form: str) -> None:
    folder = tmp_path / form
    if form.startswith("terminal-bench"):
        terminal_bench(folder, typed=form.endswith("typed"))
    else:
        harbor(folder, WRITES_REWARD if form == "reward" else DOWNLOADS_PYTEST)
    (task,) = tasks_of(folder)
    assert task.kind is (ReportKind.EXIT_CODE if form == "reward" else ReportKind.JUNIT)
    assert "hello.txt" in task.problem
    result = asyncio.run(checked(task, oracle(folder)))
    assert result.is_sound, result


def test_the_tests_of_others_give_no_partial_credit(tmp_path: Path) -> None:
    (task,) = tasks_of(terminal_bench(tmp_path / "task"))
    assert task.packages == ("h11", "idna", "numpy", "pytest")
    assert asyncio.run(checked(task, "echo wrong > hello.txt")).solution == 0.0


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("docker-compose.yaml", "services: {client: {}, db: {}}", "expected one service, got client, db"),
        ("Dockerfile", None, "expected a Dockerfile or the name of an image, found none"),
        ("tests/run-uv-pytest.sh", "pip install none-has-this", "its tests need the package none-has-this"),
        ("solution.yaml", "- {command: vim a, append_enter: false}", "whole commands, got keys .*'vim a'"),
        ("solution.yaml", None, "expected one script as the solution"),
        ("task.yaml", "tags: []", r"expected task.yaml with an instruction.*instruction"),
    ],
)
def test_a_task_that_cannot_be_played_here_is_refused(tmp_path: Path, file: str, text: str | None, says: str) -> None:
    folder = terminal_bench(tmp_path / "task", typed=True)
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(TaskError, match=says):
        asyncio.run(checked(next(iter(tasks_of(folder))), oracle(folder)))


def test_a_reward_that_the_agent_writes_itself_counts_for_nothing(tmp_path: Path) -> None:
    (task,) = tasks_of(harbor(tmp_path / "task"))
    forged = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; true"
    assert asyncio.run(checked(task, forged)).solution == 0.0


def test_files_of_the_environment_are_in_the_tree(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "task", dockerfile="FROM python:3.13\nWORKDIR /app\nCOPY data .\nCOPY more/a.txt .\n")
    (folder / "environment" / "data").mkdir()
    (folder / "environment" / "data" / "b.txt").write_text("b")
    (folder / "environment" / "more").mkdir()
    (folder / "environment" / "more" / "a.txt").write_text("a")
    (task,) = tasks_of(folder)
    (folder / "tests" / "test.sh").write_text(WRITES_REWARD)
    assert asyncio.run(checked(task, f'[ "$(cat a.txt b.txt)" = ab ] && {HELLO}')).solution == 1.0


def test_an_environment_that_installs_is_refused_without_an_engine(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "task", dockerfile="FROM ubuntu:24.04\nRUN apt-get install -y \\\n    git\n")
    missing = DockerLike("no-such-engine")
    with pytest.raises(TaskError, match="needs a container engine: no-such-engine is not installed"):
        image_tree("", "/app", context=folder, why="RUN apt-get", engines=[missing])
    assert "apt-get" in recipe_of((folder / "environment" / "Dockerfile").read_text()).engine_for


def test_a_context_outside_of_the_task_is_refused(tmp_path: Path) -> None:
    folder = harbor(tmp_path / "task", dockerfile="FROM x\nWORKDIR /app\nCOPY ../../secret .\n")
    (tmp_path / "secret").write_text("x")
    with pytest.raises(TaskError, match="expected a file of its folder"):
        list(tasks_of(folder))


@pytest.mark.parametrize(
    ("lines", "target"),
    [
        ("WORKDIR /app\nCOPY a /app/../../etc/a", "/etc/a"),
        ("WORKDIR /app/..\nCOPY a ./", "/"),
        ("WORKDIR /app/../..\nCOPY a a", "/a"),
        ("WORKDIR /app\nCOPY a b ../../", "/"),
    ],
)
def test_a_path_of_a_dockerfile_leads_nowhere_but_where_it_says(lines: str, target: str) -> None:
    recipe = recipe_of(f"FROM ubuntu:24.04\n{lines}\n")
    assert recipe.copies[0] == ("a", target)
    assert ".." not in recipe.place


@pytest.mark.parametrize("lines", ["COPY a.txt .", "COPY a.txt /app", "WORKDIR /app/b\nCOPY a.txt /app/"])
def test_a_file_that_another_image_has_elsewhere_needs_that_image(lines: str, tmp_path: Path) -> None:
    folder = harbor(tmp_path / "task", dockerfile=f"FROM ubuntu:24.04\n{lines}\n")
    (folder / "environment" / "a.txt").write_text("a")
    with pytest.raises(TaskError, match="COPY to"):
        list(tasks_of(folder))


@pytest.mark.parametrize("place", ["environment/link.txt", "environment/data/link.txt", "tests/link.txt"])
def test_a_link_of_a_task_brings_in_no_file_of_this_machine(place: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("swordfish\n")
    folder = harbor(tmp_path / "task", dockerfile="FROM ubuntu:24.04\nWORKDIR /app\nCOPY . .")
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).symlink_to(tmp_path / "secret")
    with pytest.raises(TaskError, match=r"expected a file of its folder, got .*link\.txt"):
        list(tasks_of(folder))


@pytest.mark.parametrize("name", ["link/secret", "/{}/secret"])
def test_a_test_patch_writes_and_reads_no_file_outside_of_the_tree(name: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "secret").write_text("swordfish\n")
    (tmp_path / "source" / "link").symlink_to(tmp_path)
    name = name.format(tmp_path)
    patch = f"--- a/{name}\n+++ b/{name}\n@@ -1 +1,2 @@\n swordfish\n+more\n"
    with pytest.raises(TaskError, match="test_patch"):
        list(changed(tree_of(tmp_path / "source"), patch))


def test_a_folder_of_tasks_gives_each(tmp_path: Path) -> None:
    harbor(tmp_path / "tasks" / "a")
    terminal_bench(tmp_path / "tasks" / "b")
    assert [task.id for task in tasks_of(tmp_path / "tasks")] == ["a", "b"]


def test_an_instance_of_swe_bench_has_its_tests_from_the_test_patch(tmp_path: Path) -> None:
    package = written(tmp_path / "trees" / "owner__numbers")
    source = package / "src" / "numbers_of" / "__init__.py"
    wrong = SOURCE.replace("return most", "return number")
    source.write_text(wrong)
    (package / "tests" / "test_numbers_of.py").unlink()
    added = "from numbers_of import clipped, total\n\n\ndef test_clipped():\n    assert clipped(11) == 10\n\n\n"
    added += "def test_total():\n    assert total([1]) == 1\n"
    row = {
        "instance_id": "owner__numbers-1",
        "repo": "owner/numbers",
        "base_commit": "0" * 40,
        "problem_statement": "clipped(11) gives 11.",
        "patch": difference_of("src/numbers_of/__init__.py", wrong, SOURCE),
        "test_patch": difference_of("tests/test_new.py", "", added).replace("--- a/tests/test_new.py", "--- /dev/null"),
        "FAIL_TO_PASS": json.dumps(["tests/test_new.py::test_clipped"]),
        "PASS_TO_PASS": json.dumps(["tests/test_new.py::test_total"]),
        "version": "1",
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (task,) = tasks_of(tmp_path / "rows.jsonl", tmp_path / "trees")
    assert list(task.files) == ["tests/test_new.py"]
    assert asyncio.run(checked(task)).is_sound


@pytest.mark.parametrize("plants", [True, False], ids=["SWE-smith", "SWE-bench"])
def test_no_history_of_a_repository_shows_the_solution(tmp_path: Path, plants: bool) -> None:
    wrong, repository = SOURCE.replace("return most", "return number"), tmp_path / "repo"
    repository.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], cwd=repository, check=True)
    for text in (SOURCE if plants else wrong, SOURCE):  # the second commit is the future of the base commit
        (repository / "a.py").write_text(text)
        subprocess.run([*git, "add", "a.py"], cwd=repository, check=True)
        subprocess.run([*git, "commit", "-qm", "a", "--allow-empty"], cwd=repository, check=True)
    subprocess.run([*git, "reset", "-q", "--hard", "HEAD~1"], cwd=repository, check=True)
    patch = difference_of("a.py", SOURCE, wrong) if plants else difference_of("a.py", wrong, SOURCE)
    fields = {"instance_id": "repo-1", "repo": "owner/repo", "problem_statement": "?", "patch": patch}
    fields |= {} if plants else {"base_commit": "0" * 40}
    (tmp_path / "rows.jsonl").write_text(json.dumps({**fields, "FAIL_TO_PASS": ["t.py::a"], "PASS_TO_PASS": []}))
    (task,) = tasks_of(tmp_path / "rows.jsonl")

    async def looked() -> bytes:
        with await opened(task) as workspace:
            return (await workspace.run("cat a.py; git diff; git log -p --all --reflog")).stdout

    shown = asyncio.run(looked())
    assert b"return number" in shown
    assert b"return most" not in shown


@pytest.mark.parametrize("name", ["oauthlib__oauthlib.1fd52536", "oauthlib__oauthlib.1fd52536.tar.gz", "idna-3.7.zip"])
def test_a_repository_whose_name_has_a_dot_is_found(tmp_path: Path, name: str) -> None:
    (source := tmp_path / "made").mkdir()
    (source / "program.py").write_text("x = 1\n")
    kind = {".gz": "gztar", ".zip": "zip"}.get(Path(name).suffix)
    if kind is None:
        source.rename(tmp_path / name)
    else:
        shutil.make_archive(str(tmp_path / name.removesuffix(".zip").removesuffix(".tar.gz")), kind, source)
    repo = "idna-3.7" if name.startswith("idna") else "swesmith/oauthlib__oauthlib.1fd52536"
    fields = {"instance_id": "one.func.1", "repo": repo, "problem_statement": "?", "patch": ""}
    (tmp_path / "rows.jsonl").write_text(json.dumps({**fields, "FAIL_TO_PASS": ["t.py::a"], "PASS_TO_PASS": []}))
    (task,) = tasks_of(tmp_path / "rows.jsonl")
    assert task.red == ("t.py::a",)


def test_an_instance_without_its_repository_names_what_is_missing(tmp_path: Path) -> None:
    row = {"instance_id": "a", "repo": "o/r", "base_commit": "1", "problem_statement": "", "patch": ""}
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "FAIL_TO_PASS": [], "PASS_TO_PASS": []}))
    with pytest.raises(TaskError, match="expected one of a, o__r, r, tree in"):
        list(tasks_of(tmp_path / "rows.jsonl"))


def test_of_an_instance_of_an_image_only_changes_to_its_repository_count(tmp_path: Path, image_root: Path) -> None:
    (image_root / "testbed").mkdir()
    prepare_as("image made /testbed", tree_of(image_root, place="/testbed"))
    row = {"instance_id": "a", "repo": "o/r", "base_commit": "1", "problem_statement": "", "patch": ""}
    row |= {"image_name": "made", "FAIL_TO_PASS": ["tests/test_a.py::test_b"], "PASS_TO_PASS": []}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (task,) = tasks_of(tmp_path / "rows.jsonl")
    assert task.restored == ("tests/test_a.py", "/")


def test_a_reversed_difference_undoes_it(tmp_path: Path) -> None:
    after = SOURCE.replace("return most", "return number").replace("result = 0", "result = 1\n    pass")
    patch = difference_of("a.py", SOURCE, after)
    (tmp_path / "a.py").write_text(SOURCE)
    for one in (patch, reversed_patch(patch)):
        subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=one.encode(), check=True)
    assert (tmp_path / "a.py").read_text() == SOURCE


def test_lines_that_look_like_headers_are_reversed_as_lines(tmp_path: Path) -> None:
    before = "a\n-- of SQL\n++ b\nindex 1\nlast"
    for after in ("a\n-- b/of SQL\n++ b\ndiff\n\nlast", "-- x\n", before.replace("++ b", "")):
        patch = difference_of("a.sql", before, after)
        (tmp_path / "a.sql").write_text(before)
        for one in (patch, reversed_patch(patch)):
            subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=one.encode(), check=True)
        assert (tmp_path / "a.sql").read_text() == before


def test_a_test_patch_of_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x = 1\n2\n3\n4\n# caf\xe9\n")
    patch = "--- a/a.py\n+++ b/a.py\n@@ -1,4 +1,4 @@\n-x = 1\n+x = 2\n 2\n 3\n 4\n"
    with pytest.raises(TaskError, match="expected files of text"):
        list(changed(tree_of(tmp_path), patch))


REMOVED = """diff --git a/old.py b/old.py
deleted file mode 100644
--- a/old.py
+++ /dev/null
@@ -1 +0,0 @@
-x = 1
"""
MOVED = """diff --git a/old.py b/tests/new.py
similarity index 100%
rename from old.py
rename to tests/new.py
"""


@pytest.mark.parametrize(("patch", "written"), [(REMOVED, {}), (MOVED, {"tests/new.py": "x = 1\n"})])
def test_a_test_patch_may_remove_and_rename_files(patch: str, written: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("x = 1\n")
    assert dict(changed(tree_of(tmp_path), patch)) == written


def test_a_test_patch_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("other\n")
    with pytest.raises(TaskError, match="does not fit the tree"):
        list(changed(tree_of(tmp_path), difference_of("a.py", "x\n", "y\n")))
