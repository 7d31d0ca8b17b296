"""Tasks of other projects' formats as tasks of a workspace: SWE-smith, SWE-bench, Harbor and terminal-bench.

Nothing in the tasks is changed. An environment that a folder of files can stand in for needs no container: commands
then run on this machine's own bash and Python. Every other one comes from its image, by a container engine.
"""

import json
import posixpath
import re
import shlex
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from shoal.errors import TaskError
from shoal.software.images import image_tree
from shoal.software.instances import INSTANCES, TREE, Instance
from shoal.tasks.jsonl import rows_of
from shoal.workspace.reports import ReportKind
from shoal.workspace.task import WorkspaceTask
from shoal.workspace.tree import Tree, tree_of

PYTEST = ("python", "-m", "pytest", "-q", "-o", "addopts=")
_REWARD = "/logs/verifier/reward.txt"
_SCRIPT = (
    f"bash /tests/test.sh; exec python3 -c 'import sys; sys.exit(float(open(\"{_REWARD}\").read()) < 1)'",
    "bash /tests/run-tests.sh",
)
"""Harbor's script writes a reward; the one of terminal-bench ends with the exit code of its tests."""
_PYTEST_OF = re.compile(r"pytest\b[^\n;|&]*?\s((?:/tests|\$TEST_DIR)/[\w./-]+\.py)")
_ALONE = {"FROM", "WORKDIR", "COPY", "ADD", "CMD", "ENTRYPOINT", "LABEL", "MAINTAINER", "EXPOSE", "USER"}
"""Instructions of a Dockerfile that a folder of files can stand in for."""


def tasks_of(source: Path, trees: Path | None = None) -> Iterator[WorkspaceTask]:
    """Tasks of a folder or a file; its names tell the format.

    `trees` is a folder with the repositories of SWE-bench or SWE-smith, each a folder or an archive that has the name
    of the instance or of the repository. Raises `TaskError`.
    """
    if (source / "task.toml").is_file():
        yield harbor_task(source)
    elif (source / "task.yaml").is_file():
        yield terminal_task(source)
    elif (source / INSTANCES).is_file():
        yield from _of_rows(source / INSTANCES, source)
    elif source.is_dir() and (
        inner := sorted({path.parent for path in (*source.glob("*/task.toml"), *source.glob("*/task.yaml"))})
    ):
        for folder in inner:
            yield from tasks_of(folder)
    elif source.is_file():
        yield from _of_rows(source, trees or source.parent)
    else:
        expected = f"task.toml (Harbor), task.yaml (terminal-bench) or {INSTANCES}, or a file of instances"
        raise TaskError(f"{source}: expected a folder with {expected}")


def _of_rows(file: Path, trees: Path) -> Iterator[WorkspaceTask]:
    for number, row in rows_of(file):
        lists = {name: json.loads(text) for name in _LISTS if isinstance(text := row.get(name), str)}
        try:
            yield instance_task(msgspec.convert({**row, **lists}, Instance), trees)
        except msgspec.ValidationError as error:
            raise TaskError(f"{file}:{number}: expected an instance of SWE-bench or SWE-smith: {error}") from None


_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
"""Columns that SWE-bench writes as JSON in a text."""


def instance_task(one: Instance, trees: Path) -> WorkspaceTask:
    """The task of an instance: SWE-smith's patch plants the fault, SWE-bench's mends it. Raises `TaskError`."""
    short = one.repo.rpartition("/")[2]
    names = (one.instance_id, one.repo.replace("/", "__"), short, TREE)
    found = [
        path for name in names for path in sorted(trees.glob(f"{name}*")) if path.stem.partition(".tar")[0] == name
    ]
    if not found and not one.image_name:
        raise TaskError(f"{one.instance_id}: expected one of {', '.join(names)} in {trees}, as a folder or an archive")
    tree = tree_of(found[0]) if found else image_tree(one.image_name, "/testbed")
    plants = not one.base_commit
    files = sorted({test.partition("::")[0] for test in (*one.FAIL_TO_PASS, *one.PASS_TO_PASS)})
    return WorkspaceTask(
        id=one.instance_id,
        problem=one.problem_statement,
        tree=tree.digest,
        place=tree.place,
        patch=one.patch if plants else "",
        solution=reversed_patch(one.patch) if plants else one.patch,
        packages=("pytest", *one.packages) if found else (),
        command=(*PYTEST, "-o", "pythonpath=. src", *files),
        files=dict(changed(tree, one.test_patch)) if one.test_patch else {},
        red=tuple(one.FAIL_TO_PASS),
        green=tuple(one.PASS_TO_PASS),
        restored=tuple(files),
        split=one.split,
    )


def reversed_patch(patch: str) -> str:
    """The difference that undoes a difference.

    >>> print(reversed_patch("--- a/f\\n+++ b/f\\n@@ -1,2 +1 @@\\n-a\\n b\\n"), end="")
    --- a/f
    +++ b/f
    @@ -1 +1,2 @@
    +a
     b
    """
    signs = {"-": "+", "+": "-"}

    def turned(line: str) -> str:
        if found := re.match(r"@@ -(\S+) \+(\S+) @@(.*)", line, re.DOTALL):
            return f"@@ -{found[2]} +{found[1]} @@{found[3]}"
        if line.startswith(("--- ", "+++ ", "diff ", "index ")):
            return line
        return signs.get(line[:1], line[:1]) + line[1:]

    return "".join(map(turned, re.findall(r"[^\n]*\n|[^\n]+", patch)))


def changed(tree: Tree, patch: str) -> Iterator[tuple[str, str]]:
    """Path and text of each file that a patch writes. Raises `TaskError` when it does not fit the tree."""
    names = re.findall(r"^\+\+\+ b/(\S+)", patch, re.MULTILINE)
    if outside := [name for name in names if not (tree.base / name).resolve().is_relative_to(tree.base.resolve())]:
        raise TaskError(f"test_patch: expected files of the tree, got {outside[0]}")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if (tree.base / name).is_file():
                target.write_bytes((tree.base / name).read_bytes())
        done = subprocess.run(["git", "apply", "-"], cwd=folder, input=patch.encode(), capture_output=True, check=False)
        if done.returncode:
            raise TaskError(f"test_patch: it does not fit the tree: {done.stderr.decode(errors='replace')[:300]}")
        yield from ((name, Path(folder, name).read_text()) for name in names if Path(folder, name).is_file())


def harbor_task(folder: Path) -> WorkspaceTask:
    """A task of Harbor: its script's reward decides, or pytest where the script runs it. Raises `TaskError`."""
    try:
        config = tomllib.loads((folder / "task.toml").read_text())
        problem = (folder / "instruction.md").read_text()
    except (OSError, ValueError) as error:
        raise TaskError(f"{folder}: expected task.toml and instruction.md: {error}") from None
    tree = _environment(folder / "environment", config.get("environment", {}).get("docker_image", ""))
    return _scripted(folder, problem, tree, _SCRIPT[0], "test.sh", config.get("verifier", {}).get("timeout_sec", 600.0))


def terminal_task(folder: Path) -> WorkspaceTask:
    """A task of terminal-bench. Raises `TaskError`."""
    import yaml

    try:
        config = yaml.safe_load((folder / "task.yaml").read_text())
        problem = config["instruction"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise TaskError(f"{folder}: expected task.yaml with an instruction: {error}") from None
    tree = _environment(folder, "")
    wall_s = float(config.get("max_test_timeout_sec", 600.0))
    return _scripted(folder, problem, tree, _SCRIPT[1], "run-tests.sh", wall_s)


def _scripted(folder: Path, problem: str, tree: Tree, script: str, name: str, wall_s: float) -> WorkspaceTask:
    tests = folder / "tests"
    files = {f"/tests/{path.relative_to(tests)}": path for path in sorted(tests.rglob("*")) if path.is_file()}
    if (folder / name).is_file():
        files[f"/tests/{name}"] = folder / name
    for path in files.values():
        _check_own(folder, path)
    try:
        texts = {target: path.read_text() for target, path in files.items()}
    except UnicodeDecodeError as error:
        raise TaskError(f"{tests}: expected tests of text only: {error}") from None
    if f"/tests/{name}" not in texts:
        raise TaskError(f"{folder}: expected {name}, found none")
    pytests = [found.replace("$TEST_DIR", "/tests") for found in _PYTEST_OF.findall(texts[f"/tests/{name}"])]
    return WorkspaceTask(
        id=folder.name,
        problem=problem,
        tree=tree.digest,
        place=tree.place,
        packages=() if tree.has_system else ("pytest",),
        command=(*PYTEST, *pytests) if pytests else ("/bin/bash", "-c", script),
        kind=ReportKind.JUNIT if pytests else ReportKind.EXIT_CODE,
        files={**texts, "/logs/verifier/.kept": ""},
        wall_s=wall_s,
    )


def oracle(folder: Path) -> str:
    """The script that solves a task of Harbor or terminal-bench. Raises `TaskError`."""
    scripts = [path for path in (folder / "solution" / "solve.sh", folder / "solution.sh") if path.is_file()]
    if not scripts or ((folder / "solution").is_dir() and len(list((folder / "solution").iterdir())) > 1):
        raise TaskError(f"{folder}: expected one script as the solution, solution/solve.sh or solution.sh")
    return scripts[0].read_text()


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A Dockerfile, as far as a folder of files can stand in for it."""

    place: str
    copies: tuple[tuple[str, str], ...]
    """Source in the context, and absolute target, of each file or folder; one that ends with / takes files."""
    engine_for: str
    """The first instruction that needs a container engine; empty when none does."""


def recipe_of(dockerfile: str) -> Dockerfile:
    """A Dockerfile, read.

    >>> recipe_of("FROM ubuntu:24.04\\nWORKDIR /app\\nCOPY a.py b.py ./\\n").copies
    (('a.py', '/app/'), ('b.py', '/app/'))
    >>> recipe_of("FROM ubuntu:24.04\\nRUN apt-get install -y git\\n").engine_for
    'RUN apt-get install -y git'
    """
    place, copies, engine_for = "/", list[tuple[str, str]](), ""
    for line in re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n?", "", dockerfile, flags=re.MULTILINE)).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "WORKDIR":
            place = _joined(place, rest.strip())
        elif word.upper() in ("COPY", "ADD") and not rest.lstrip().startswith(("--", "[", "http")):
            *sources, target = shlex.split(rest)
            into = target.endswith(("/", ".")) or len(sources) > 1
            copies += [(one, _joined(place, target).rstrip("/") + "/" * into) for one in sources]
        elif word and word.upper() not in _ALONE - {"COPY", "ADD"}:
            engine_for = engine_for or line.strip()
    return Dockerfile(place, tuple(copies), engine_for)


def _joined(*parts: str) -> str:
    """An absolute path without `..`, which else would lead out of a folder that the path seems to be in."""
    return posixpath.normpath(posixpath.join(*parts))


def _environment(context: Path, image: str) -> Tree:
    """The tree of a task's environment: a folder's files where these suffice, else the root of its image."""
    dockerfile = context / "Dockerfile"
    recipe = recipe_of(dockerfile.read_text()) if dockerfile.is_file() else Dockerfile("/app", (), "")
    place = recipe.place if recipe.place != "/" else "/app"
    outside = [target for _, target in recipe.copies if not PurePosixPath(target).is_relative_to(place)]
    if image or recipe.engine_for or outside:
        return image_tree(image, place, context=context, why=recipe.engine_for or f"COPY to {', '.join(outside)}")
    with tempfile.TemporaryDirectory() as made:
        for source, target in recipe.copies:
            _copy(context, source, Path(made, PurePosixPath(target).relative_to(place)), takes=target.endswith("/"))
        return tree_of(Path(made), place=place)


def _check_own(folder: Path, path: Path) -> None:
    """Raises `TaskError` for a path that leads out of a folder, as a link may."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TaskError(f"{folder}: expected a file of its folder, got {path}")


def _copy(context: Path, source: str, target: Path, *, takes: bool) -> None:
    """Copies what a folder has, or a file, which keeps its name in a target that takes files."""
    path = (context / source).resolve()
    if not path.exists():
        raise TaskError(f"{context}/Dockerfile: expected a file of its folder, got COPY {source}")
    for file in (path, *path.rglob("*")):
        _check_own(context, file)
        if file.is_file() and file.name != "Dockerfile":
            into = target / file.relative_to(path) if path.is_dir() else target / (path.name if takes else "")
            into.parent.mkdir(parents=True, exist_ok=True)
            into.write_bytes(file.read_bytes())
            into.chmod(file.stat().st_mode & 0o777)
