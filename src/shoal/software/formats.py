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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

import msgspec

from shoal.errors import TaskError
from shoal.software.images import image_tree
from shoal.software.instances import INSTANCES, TREE, Instance
from shoal.tasks.jsonl import rows_of
from shoal.workspace.reports import ReportKind
from shoal.workspace.task import WorkspaceTask
from shoal.workspace.tree import Tree, tree_of

PLACE = "/app"
"""Folder of the commands in the base images of terminal-bench, and of a task without a Dockerfile."""
PYTEST = ("python", "-m", "pytest", "-q", "-o", "addopts=")
_REWARD = "/logs/verifier/reward.txt"
_SCRIPT = (
    f"bash /tests/test.sh; exec python3 -c 'import sys; sys.exit(float(open(\"{_REWARD}\").read()) < 1)'",
    "TEST_DIR=/tests bash /tests/run-tests.sh",
)
"""Harbor's script writes a reward; the one of terminal-bench ends with the exit code of its tests."""
_PYTEST_OF = re.compile(r"pytest\b[^\n;|&]*?\s((?:/tests|\$TEST_DIR)/[\w./-]+\.py)")
_INSTALLED = re.compile(
    r"(?:^|[;&|(])\s*(?:sudo\s+)?(?:python3?\s+-m\s+)?(?:uv\s+add|(?:uv\s+)?pip3?\s+install)\s([^\n;&|)]+)",
    re.MULTILINE,
)
"""Command of a shell that installs packages, and its words."""
_OPTION = re.compile(
    r"\s(?:-[rctpif]|--(?:requirement|constraint|target|python|index|(?:extra-|default-)?index-url|find-links|prefix))[\s=]\s*\S+"
)
"""Option of such a command with its value."""
_REQUIREMENT = re.compile(r"[\"']?([A-Za-z][\w.-]*)(?:[\[=<>!~].*)?[\"']?")
_ARCHIVE = re.compile(r"\.(?:tar(?:\.\w+)?|tgz|zip|whl|bundle)$")
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
    found = [path for name in names for path in sorted(trees.glob(f"{name}*")) if _ARCHIVE.sub("", path.name) == name]
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
        restored=(*files, *([] if found else ["/"])),
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
    signs, counted = {"-": "+", "+": "-"}, {"-": (1, 0), "+": (0, 1), "\\": (0, 0)}
    old = new = 0  # lines of the hunk that are to come: they may look like headers
    lines = re.findall(r"[^\n]*\n|[^\n]+", patch)
    for at, line in enumerate(lines):
        if old > 0 or new > 0:
            before, after = counted.get(line[:1], (1, 1))
            old, new = old - before, new - after
            lines[at] = signs.get(line[:1], line[:1]) + line[1:]
        elif found := re.match(r"@@ -(\d+(?:,(\d+))?) \+(\d+(?:,(\d+))?) @@(.*)", line, re.DOTALL):
            old, new = int(found[2] or 1), int(found[4] or 1)
            lines[at] = f"@@ -{found[3]} +{found[1]} @@{found[5]}"
    return "".join(lines)


def changed(tree: Tree, patch: str) -> Iterator[tuple[str, str]]:
    """Path and text of each file that a patch writes. Raises `TaskError` when it does not fit the tree."""
    read = re.findall(r"^(?:--- a/|(?:rename|copy) from )(\S+)", patch, re.MULTILINE)
    names = dict.fromkeys(re.findall(r"^(?:\+\+\+ b/|(?:rename|copy) to )(\S+)", patch, re.MULTILINE))
    every = {*read, *names}
    if outside := [name for name in every if not (tree.base / name).resolve().is_relative_to(tree.base.resolve())]:
        raise TaskError(f"test_patch: expected files of the tree, got {outside[0]}")
    with tempfile.TemporaryDirectory() as folder:
        for name in every:
            if (tree.base / name).is_file():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((tree.base / name).read_bytes())
        done = subprocess.run(["git", "apply", "-"], cwd=folder, input=patch.encode(), capture_output=True, check=False)
        if done.returncode:
            raise TaskError(f"test_patch: it does not fit the tree: {done.stderr.decode(errors='replace')[:300]}")
        try:
            yield from ((name, Path(folder, name).read_text()) for name in names if Path(folder, name).is_file())
        except UnicodeDecodeError as error:
            raise TaskError(f"test_patch: expected files of text: {error}") from None


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
    try:
        config = msgspec.yaml.decode((folder / "task.yaml").read_bytes(), type=_TerminalTask)
    except (OSError, msgspec.MsgspecError) as error:
        raise TaskError(f"{folder}: expected task.yaml with an instruction: {error}") from None
    tree = _environment(folder, "")
    return _scripted(folder, config.instruction, tree, _SCRIPT[1], "run-tests.sh", config.max_test_timeout_sec)


class _TerminalTask(msgspec.Struct):
    instruction: str
    max_test_timeout_sec: float = 600.0


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
    script_text = texts[f"/tests/{name}"]
    called = [
        text for target, text in texts.items() if target.endswith(".sh") and target.rpartition("/")[2] in script_text
    ]
    pytests = [
        found.replace("$TEST_DIR", "/tests") for text in (script_text, *called) for found in _PYTEST_OF.findall(text)
    ]
    return WorkspaceTask(
        id=folder.name,
        problem=problem,
        tree=tree.digest,
        place=tree.place,
        packages=() if tree.has_system else _packages(folder, (script_text, *called)),
        command=(*PYTEST, *pytests) if pytests else ("/bin/bash", "-c", script),
        kind=ReportKind.JUNIT if pytests else ReportKind.EXIT_CODE,
        files={**texts, "/logs/verifier/.kept": ""},
        wall_s=wall_s,
        all_or_nothing=True,
    )


def _packages(folder: Path, scripts: Iterable[str]) -> tuple[str, ...]:
    """Pytest, and the packages that test scripts install, which this machine must have. Raises `TaskError`."""
    lines = (re.sub(r"\\\n", " ", re.sub(r"(^|\s)#.*", "", script)) for script in scripts)
    words = (
        word for line in lines for found in _INSTALLED.findall(line) for word in _OPTION.sub("", f" {found}").split()
    )
    named = {required[1] for word in words if (required := _REQUIREMENT.fullmatch(word))} - {"pip", "uv"}
    try:
        for name in sorted(named):
            distribution(name)
    except PackageNotFoundError as error:
        raise TaskError(f"{folder}: its tests need the package {error.name}; install it here") from None
    return tuple(sorted({"pytest", *named}))


def oracle(folder: Path) -> str:
    """The script that solves a task of Harbor or terminal-bench. Raises `TaskError`."""
    for script in (folder / "solution" / "solve.sh", folder / "solution.sh"):
        if script.is_file() and (script.parent == folder or len(list(script.parent.iterdir())) == 1):
            return script.read_text()
    expected = f"{folder}: expected one script as the solution, solution/solve.sh or solution.sh, or solution.yaml"
    try:
        steps = msgspec.yaml.decode((folder / "solution.yaml").read_bytes(), type=list[_Typed])
    except (OSError, msgspec.MsgspecError) as error:
        raise TaskError(f"{expected}: {error}") from None
    if keys := [step.command for step in steps if not step.append_enter]:
        raise TaskError(f"{expected} of whole commands, got keys for a terminal: {keys[0][:80]!r}")
    return "\n".join(step.command for step in steps)


class _Typed(msgspec.Struct):
    """Keys that terminal-bench types into a terminal."""

    command: str
    append_enter: bool = True


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
        if word.upper() == "FROM" and "/t-bench/" in rest:
            place = PLACE
        elif word.upper() == "WORKDIR":
            place = _joined(place, rest.strip())
        elif word.upper() in ("COPY", "ADD") and not rest.lstrip().startswith(("--", "[", "http")):
            *sources, target = shlex.split(rest)
            into = target.endswith(("/", ".")) or len(sources) > 1 or _joined(place, target) == place
            copies += [(one, _joined(place, target).rstrip("/") + "/" * into) for one in sources]
        elif word and word.upper() not in _ALONE - {"COPY", "ADD"}:
            engine_for = engine_for or line.strip()
    return Dockerfile(place, tuple(copies), engine_for)


def _joined(*parts: str) -> str:
    """An absolute path without `..`, which else would lead out of a folder that the path seems to be in."""
    return posixpath.normpath(posixpath.join(*parts))


def _environment(context: Path, image: str) -> Tree:
    """The tree of a task's environment: a folder's files where these suffice, else the root of its image."""
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (context / name).is_file() and len(others := _services(context / name)) > 1:
            raise TaskError(f"{context / name}: expected one service, got {', '.join(others)}")
    dockerfile = context / "Dockerfile"
    if not image and not dockerfile.is_file():
        raise TaskError(f"{context}: expected a Dockerfile or the name of an image, found none")
    recipe = recipe_of(dockerfile.read_text() if dockerfile.is_file() else "")
    place = recipe.place if recipe.place != "/" else PLACE
    outside = [
        target for _, target in recipe.copies if target == place or not PurePosixPath(target).is_relative_to(place)
    ]
    if image or recipe.engine_for or outside:
        return image_tree(image, place, context=context, why=recipe.engine_for or f"COPY to {', '.join(outside)}")
    with tempfile.TemporaryDirectory() as made:
        for source, target in recipe.copies:
            _copy(context, source, Path(made, PurePosixPath(target).relative_to(place)), takes=target.endswith("/"))
        return tree_of(Path(made), place=place)


def _services(file: Path) -> list[str]:
    """Names of the containers of an environment. Raises `TaskError`."""
    try:
        return list(msgspec.yaml.decode(file.read_bytes(), type=_Compose).services)
    except (OSError, msgspec.MsgspecError) as error:
        raise TaskError(f"{file}: {error}") from None


class _Compose(msgspec.Struct):
    services: dict[str, object]


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
