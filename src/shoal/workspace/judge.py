"""Verdict on a workspace: hidden tests run in a second sandbox, after all processes of the first have ended.

The second sandbox sees the workspace's changes as a read-only layer. Above them lies a layer with the hidden tests and
with the tree's own files at the restored paths, so what an agent left at these paths counts for nothing. Its home and
its temporary files are not there either.
"""

import asyncio
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import all_suffixes
from pathlib import Path, PurePosixPath

import msgspec

from shoal.errors import SandboxUnavailable, TaskError
from shoal.sandbox.program import Ended, Finished, ProgramLimits
from shoal.sandbox.usage import left_in, remove_tree
from shoal.workspace.fork import HOME, LIMITS, ForkKind, Workspace, copied, fork, held
from shoal.workspace.reports import ReportKind, TestStatus, results
from shoal.workspace.tree import OPAQUE, walked

_CONFIGS = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    "pyproject.toml",
)
STEERING = (
    *(*_CONFIGS, "sitecustomize.py", "usercustomize.py", "pytest.py", "_pytest", "unittest", "unittest.py", "pluggy"),
)
"""Paths that decide how tests run; they are restored for every verdict."""
_NEEDED = sys.stdlib_module_names | {
    *("sitecustomize", "usercustomize", "pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "colorama"),
    *("exceptiongroup", "tomli"),
}
"""Modules that a check may import besides the tree's own."""
_ENTRY_POINTS = "/entry_points.txt"
"""The file of an installation that can make a plugin of a module."""
MOST_REPORT_BYTES = 16 << 20
_LOG_CHARACTERS = 4000
_OUTSIDE = "/"
_REPORT = f"{HOME[1:]}/report.xml"
_NOT_BEGUN = (1, 126, 127)
"""Exit codes of a Python without pytest, and of a shell or `env` without the program."""
_SOURCES = PurePosixPath("src")
_UNTESTED = (TestStatus.SKIPPED, TestStatus.XFAILED)
"""Results that any code which a test calls can bring about."""


class HiddenTests(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tests that an agent does not see, and how they decide."""

    command: tuple[str, ...] = ("python", "-m", "pytest", "-q")
    """Command in the tree's folder; "python" is as in `Workspace.run_program`. It names the tests to run."""
    kind: ReportKind = ReportKind.JUNIT
    files: dict[str, str] = {}
    """Text by path, relative to the tree's folder or absolute below one of its top folders."""
    red: tuple[str, ...] = ()
    """Tests that fail in the tree and should pass. Empty: all tests of the report."""
    green: tuple[str, ...] = ()
    """Tests that pass in the tree and must still do so. One that skips or fails as expected must do so there too."""
    restored: tuple[str, ...] = ()
    """Paths of the tree's own tests, in addition to `STEERING`: the agent's changes there count for nothing.

    "/" stands for all outside of the tree's place, as an image's Python and its packages.
    """
    all_or_nothing: bool = False
    """True gives no partial credit."""
    wall_s: float = 300.0
    """Seconds that the tests may take."""

    @property
    def limits(self) -> ProgramLimits:
        """Limits of the command."""
        file_bytes = LIMITS.file_bytes
        return ProgramLimits(self.wall_s, self.wall_s, memory_bytes=2 << 30, processes=128, file_bytes=file_bytes)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of hidden files and of restored ones of the tree."""
        return (*self.files, *(name for name in self.restored if name != _OUTSIDE))

    def __post_init__(self) -> None:
        for name in (*self.files, *self.restored):
            if not PurePosixPath(name).parts or ".." in PurePosixPath(name).parts:
                raise TaskError(f"hidden tests: expected a path inside of the tree, got {name!r}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of hidden tests on a workspace."""

    reward: float
    """Share of the red tests that turned green; 0 when a green one did not stay so, and where all or nothing counts."""
    tests: Mapping[str, TestStatus]
    """Every test of the report."""
    turned_green: tuple[str, ...]
    turned_red: tuple[str, ...]
    still_red: tuple[str, ...]
    is_forged: bool
    """True if a test that must fail was reported otherwise; the reward is 0."""
    finished: Finished
    log: str
    """End of the command's output."""

    def __str__(self) -> str:
        """The verdict in a line for each kind of test, and the seconds it took."""
        lists = {"turned green": self.turned_green, "turned red": self.turned_red, "still red": self.still_red}
        said = [f"{name}: {', '.join(tests)}" for name, tests in lists.items() if tests]
        if self.is_forged:
            said.append("the report is forged: a test that must fail was reported otherwise")
        if self.finished.ended is not Ended.EXITED:
            said.append(f"the tests {self.finished.ended.value.replace('_', ' ')}")
        return "\n".join([f"verdict: {self.reward:.3g} in {self.finished.wall_s:.1f} s", *said])


async def judge(workspace: Workspace, tests: HiddenTests) -> Verdict:
    """Verdict on a workspace as it is between its commands.

    Raises `SandboxUnavailable` when no verdict can be reached: that is a failure, and no reward of 0. Raises
    `TaskError` for tests whose paths lead out of the tree.
    """
    async with workspace.turn:
        try:
            run, before = await _ran(workspace, tests), dict[str, TestStatus]()
            untested = [name for name in tests.green if run.tests.get(name) in _UNTESTED]
            if untested or run.is_silent:
                tree = replace(workspace.tree, layers=workspace.tree.layers[-1:])
                async with held(partial(fork, tree, workspace.kind, packages=workspace.packages)) as untouched:
                    other = await _ran(untouched, tests)
                before = other.tests
                if run.is_silent and other.is_silent:
                    raise SandboxUnavailable(
                        f"no verdict: {tests.command[0]} does not run: {other.output[-200:].strip()}"
                    )
                if unknown := [name for name in untested if name not in before]:
                    raise SandboxUnavailable(f"no verdict: a run of the untouched tree left no result of {unknown[0]}")
        except OSError as error:  # no space, no memory, no descriptor
            raise SandboxUnavailable(f"no verdict could be reached: {error}") from error
    return _verdict(tests, run, before)


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of hidden tests: its report, how it ended, and its output."""

    tests: dict[str, TestStatus]
    is_forged: bool
    is_silent: bool
    """Whether it reported nothing, as where Python or pytest is missing."""
    finished: Finished
    output: str


async def _ran(workspace: Workspace, tests: HiddenTests) -> _Run:
    canary = f"test_{secrets.token_hex(8)}"
    async with held(partial(_second, workspace, tests, canary)) as second:
        command, options = _command(tests, canary)
        finished = await second.run_program((*command, *options), tests.limits)
        report = left_in(second.own / _REPORT, MOST_REPORT_BYTES + 1) or b""
    output = (finished.stdout + b"\n" + finished.stderr).decode(errors="replace")
    report = report if len(report) <= MOST_REPORT_BYTES else b""
    found = dict(await asyncio.to_thread(results, tests.kind, report, output, finished.exit_code))
    is_silent = _has_canary(tests) and not found and finished.exit_code in _NOT_BEGUN
    own = [name for name in found if canary in name]
    is_forged = bool(found) and _has_canary(tests) and [found.pop(name) for name in own] != [TestStatus.FAILED]
    return _Run(found, is_forged, is_silent, finished, output)


def _verdict(tests: HiddenTests, run: _Run, before: Mapping[str, TestStatus]) -> Verdict:
    """`before` has the results without the agent: there a green test may be untested as well."""
    red = tests.red or tuple(name for name in run.tests if name not in tests.green)
    passed = {name for name, status in run.tests.items() if status is TestStatus.PASSED}
    kept = passed | {name for name, status in run.tests.items() if status in _UNTESTED and before.get(name) is status}
    turned_green = tuple(name for name in red if name in passed)
    turned_red = tuple(name for name in tests.green if name not in kept)
    reward = len(turned_green) / len(red) if red and not turned_red and not run.is_forged else 0.0
    still_red = tuple(name for name in red if name not in passed)
    if tests.all_or_nothing and still_red:
        reward = 0.0
    log = run.output[-_LOG_CHARACTERS:]
    return Verdict(reward, run.tests, turned_green, turned_red, still_red, run.is_forged, run.finished, log)


def _has_canary(tests: HiddenTests) -> bool:
    return tests.kind is ReportKind.JUNIT


def _command(tests: HiddenTests, canary: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The command, and the options that make pytest report and run the canary."""
    if tests.kind is not ReportKind.JUNIT:
        return tests.command, ()
    options = ("-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml=/{_REPORT}")
    return tests.command, ("--continue-on-collection-errors", *options, _canary_path(tests, canary))


def _canary_path(tests: HiddenTests, canary: str) -> str:
    """The canary lies in the folder of the first hidden or restored test, under a name that is new for each verdict."""
    first = next((PurePosixPath(name) for name in tests.paths), PurePosixPath())
    return str((first.parent if first.suffix else first) / f"{canary}.py")


def _second(workspace: Workspace, tests: HiddenTests, canary: str) -> Workspace:
    """A fork with the workspace's changes under a layer with the hidden tests. Raises `OSError`."""
    with tempfile.TemporaryDirectory(dir=workspace.folder) as made:
        layer = Path(made)
        _lay(layer, workspace, tests, canary)
        tops = tuple(sorted({*workspace.tree.tops, *(one.name for one in layer.iterdir())}))
        changed = replace(workspace.tree, tops=tops, layers=(workspace.own,))
        is_overlay = workspace.kind is ForkKind.OVERLAY
        takes_place = _OUTSIDE in tests.restored
        begun = workspace.tree if is_overlay or takes_place else changed
        second = fork(begun, workspace.kind, packages=workspace.packages)
        try:
            if is_overlay:
                layer = layer.rename(second.folder / "tests")
                above = (workspace.own, *workspace.tree.layers[:-1])
                if takes_place:
                    place = workspace.tree.place
                    above = tuple(_at(place, one, second.folder / f"{n}") for n, one in enumerate(above))
                second.tree = replace(changed, layers=(layer, *above, workspace.tree.layers[-1]))
                Path(made).mkdir()
            else:
                if takes_place:
                    _at(workspace.tree.place, workspace.own, second.own)
                    second.tree = changed
                _put(layer, second.own)
        except BaseException:
            second.close()
            raise
        return second


def _at(place: str, layer: Path, into: Path) -> Path:
    """A folder that has what a layer has at a tree's place, and nothing else of it. Raises `OSError`."""
    source, target = layer / place[1:], into / place[1:]
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        remove_tree(str(target))
    is_inside = source.parent.resolve().is_relative_to(layer.resolve())  # else a link of the agent leads out
    if is_inside and os.path.lexists(source) and not copied(source, target, "auto"):
        raise OSError(f"{source} could not be copied")
    return into


def _lay(layer: Path, workspace: Workspace, tests: HiddenTests, canary: str) -> None:
    """Fills the layer in the form of overlayfs: a device 0/0 removes what is below, an opaque folder hides it."""
    tree = workspace.tree
    for name in (HOME[1:], "tmp"):
        _make_opaque(layer / name)
    (layer / HOME[1:] / "tmp").mkdir()
    own = layer / tree.place[1:]
    own.mkdir(parents=True, exist_ok=True)
    restored = {*STEERING, *tests.restored, *_steering(workspace, tests)} - {_OUTSIDE}
    for name in sorted(restored, key=lambda name: len(PurePosixPath(name).parts)):  # a folder before what is in it
        source, target = tree.base / name, own / name
        if target.exists() or (os.path.lexists(target.parent) and not target.parent.is_dir()):
            continue
        _check_inside(tree.base, source)
        _check_inside(layer, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir() and not source.is_symlink():
            _make_opaque(target)
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        elif os.path.lexists(source):
            shutil.copy2(source, target, follow_symlinks=False)
        else:
            os.mknod(target, stat.S_IFCHR, os.makedev(0, 0))
    files = dict(tests.files)
    if _has_canary(tests):
        files[_canary_path(tests, canary)] = f"def {canary}():\n    assert False\n"
    for name, text in files.items():
        target = own / name if not name.startswith("/") else layer / name[1:]
        _check_inside(layer, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_text(text, encoding="utf-8", newline="")


def _steering(workspace: Workspace, tests: HiddenTests) -> Iterator[str]:
    """Paths near hidden tests that decide how these run: configurations, and the agent's modules that would shadow.

    Python searches the current folder and the folder of a script or test before all others, and often `src`.
    """
    tree = workspace.tree
    paths = [PurePosixPath(tree.place, name) for name in tests.paths]
    inside = [path.relative_to(tree.place) for path in paths if path.is_relative_to(tree.place)]
    needed = _NEEDED | {one.name.partition(".")[0] for folder in workspace.packages for one in folder.iterdir()}
    folders = {PurePosixPath(), _SOURCES, *(parent for path in inside for parent in path.parents)}
    for folder in sorted(folders, key=lambda one: len(one.parts)):
        yield from (str(folder / name) for name in _CONFIGS)
        is_searched = folder == _SOURCES or any(path.parent == folder for path in inside)
        if folder.parts and _is_package(workspace, folder, is_searched=is_searched):
            continue  # its folder is not searched
        for below in (workspace.own, *tree.layers[:-1]):
            for name in _shadows(below / tree.place[1:], folder, needed):
                if name.endswith(_ENTRY_POINTS) or not os.path.lexists(tree.base / folder / name):
                    yield str(folder / name)


def _is_package(workspace: Workspace, folder: PurePosixPath, *, is_searched: bool) -> bool:
    """Whether a folder is a package of the tree, or a new one of the agent around the tests' own folders.

    Where a test is a script, its folder is searched, and `src` may be: the agent cannot make these packages.
    """
    base, made = (root / folder for root in (workspace.tree.base, workspace.own / workspace.tree.place[1:]))
    new = made / "__init__.py"
    is_new = not is_searched and not os.path.lexists(base) and os.path.isfile(new) and not os.path.islink(new)
    return is_new or (base / "__init__.py").exists()


def _shadows(root: Path, folder: PurePosixPath, needed: Collection[str]) -> Iterator[str]:
    """Names in a folder that an import finds before the module of that name, or pytest as a plugin's."""
    with suppress(OSError):  # it is not there
        if not (root / folder).resolve().is_relative_to(root.resolve()):
            return
        if not os.access(root / folder, os.R_OK | os.X_OK):
            os.chmod(root / folder, 0o755)  # in the verdict's sandbox it has the rights of the layer above
        for one in os.scandir(root / folder):
            is_needed = one.name.partition(".")[0] in needed
            if one.name.lower().endswith((".dist-info", ".egg-info")) and not one.is_file(follow_symlinks=False):
                yield one.name + _ENTRY_POINTS
            elif is_needed and one.is_dir(follow_symlinks=False):
                yield from (f"{one.name}/__init__{end}" for end in all_suffixes())
            elif is_needed and (one.name.endswith((".py", ".pyc", ".so")) or one.is_symlink()):
                yield one.name


def _check_inside(folder: Path, path: Path) -> None:
    """Raises `TaskError` for a path in a folder that a link of the tree leads out of it."""
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise TaskError(f"hidden tests: expected a path inside of the tree, got {path.relative_to(folder)}")


def _make_opaque(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.setxattr(folder, OPAQUE, b"y")


def _put(layer: Path, onto: Path) -> None:
    """Does to a copy what overlayfs does with a layer; follows none of the links that an agent left."""
    for source in sorted(walked(layer)):
        target = onto / source.relative_to(layer)
        is_folder = source.is_dir() and not source.is_symlink()
        is_opaque = is_folder and OPAQUE in os.listxattr(source)
        if target.is_dir() and not target.is_symlink():
            if is_opaque or not is_folder:
                remove_tree(str(target))
        elif os.path.lexists(target):
            target.unlink()
        if is_folder:
            target.mkdir(exist_ok=True)
        elif not stat.S_ISCHR(source.lstat().st_mode):
            shutil.copy2(source, target, follow_symlinks=False)
