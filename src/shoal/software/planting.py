"""Software tasks from a package: faults that some of its tests notice, as instances in the fields of SWE-smith."""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import packages_distributions
from pathlib import Path, PurePosixPath

import msgspec
from libcst import ParserSyntaxError

from shoal.errors import TaskError
from shoal.sandbox.command import installed_packages
from shoal.sandbox.program import Program, ProgramLimits
from shoal.sandbox.runner import run
from shoal.software.faults import FaultyModule, Site, faulty, spread
from shoal.software.in_sandbox.suite import Tested, TestRun
from shoal.software.instances import Instance, hardness, package_tree, write_set
from shoal.tasks.holdout import EVAL_SHARE, split_of
from shoal.workspace.changes import difference_of

_PROGRAM = Path(__file__).parent / "in_sandbox" / "suite.py"
_WORK = "/shoal-work"
_START_S = 30.0
_LIMITS = ProgramLimits(cpu_s=3600, memory_bytes=8 << 30, processes=128, output_bytes=256 << 20, file_bytes=1 << 30)
JOBS_AT_ONCE = 60
"""Jobs of one sandbox; a sandbox starts in about a second, with pytest."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A prepared tree and its tests."""

    tree: Mapping[str, bytes]
    """Content of files by path."""
    warm: Sequence[str] = ()
    """Installed modules that are imported once for all runs."""

    @property
    def root(self) -> str:
        """Folder of the tree from which packages are imported."""
        return "src" if any(path.startswith("src/") for path in self.tree) else "."

    def results(self, runs: Sequence[TestRun]) -> Iterator[Tested | None]:
        """The result of each run, in order; None for a run that ran out of time or broke its process.

        Raises `TaskError` when the tests cannot be started, and `SandboxUnavailable`.
        """
        for first in range(0, len(runs), JOBS_AT_ONCE):
            yield from self._results(runs[first : first + JOBS_AT_ONCE])

    def _results(self, runs: Sequence[TestRun]) -> list[Tested | None]:
        wall_s = _START_S + sum(one.limit_s for one in runs)
        program = Program(
            source=_PROGRAM.read_text(),
            files={f"tree/{path}": content for path, content in self.tree.items()} | {"tmp/.kept": b""},
            stdin=json.dumps({"warm": list(self.warm), "jobs": [asdict(one) for one in runs]}).encode(),
            packages=installed_packages(),
            environment={
                "PYTHONPATH": os.pathsep.join([f"{_WORK}/tree/{self.root}", *map(str, installed_packages())]),
                "HOME": _WORK,
                "TMPDIR": f"{_WORK}/tmp",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                "PYTHONHASHSEED": "0",
                "COLUMNS": "80",
            },
        )
        finished = run(program, replace(_LIMITS, wall_s=wall_s))
        try:
            return msgspec.json.decode(finished.stdout, type=list[Tested | None])
        except msgspec.DecodeError:
            said = finished.stderr.decode(errors="replace").strip()[-500:]
            raise TaskError(
                f"the tests could not be run: the sandbox's program {finished.ended.value}: {said}"
            ) from None


RUNS = 5
"""Runs of all tests; a test that is not green in each of them is left out."""
LEAST_RED, MOST_RED = 0.01, 0.2
"""Shares of the tests that a fault may turn red."""
_SLOWER = 10.0
_LEAST_S = 10.0
_SHOWN_TESTS, _SHOWN_LINES = 3, 12
_NOT_SOURCE = {"tests", "test", "testing", "docs", "examples", "benchmarks", "setup.py", "conftest.py"}


def make_set(package: str, out: Path, *, most: int, limit_s: float, seed: int) -> dict[str, object]:
    """Makes the set of one package in a folder of its name, and returns its numbers.

    Raises `TaskError`, and `SandboxUnavailable`.
    """
    name, tree = package_tree(package)
    folder = out / name
    if folder.exists():
        raise TaskError(f"out: expected no folder {folder} yet; take another --out or remove it")
    base = baseline(Suite(tree))
    planting = Planting(name, base, seed)
    made = list(planting.instances(most, limit_s))
    write_set(folder, tree, made)
    kept = {"tests": len(base.green), "left_out": base.left_out, "suite_s": base.wall_s, **planting.counts}
    return {"package": name, "tasks": len(made), **kept, **hardness(made), "folder": str(folder)}


@dataclass(frozen=True, slots=True)
class Baseline:
    """A package's tests that are green in every run, and the lines that they run."""

    suite: Suite
    green: Mapping[str, float]
    """Node id -> seconds."""
    left_out: int
    """Number of tests that were red or flaky."""
    lines: Mapping[str, Mapping[int, Sequence[str]]]
    packages: Sequence[str]
    """Installed packages that the tests import."""
    wall_s: float
    """Seconds of the slowest run."""

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most tests that a kept fault turns red."""
        return math.ceil(LEAST_RED * len(self.green)), int(MOST_RED * len(self.green))

    def touching(self, path: str, lines: range) -> list[str]:
        """Green tests that run any of the lines of a file, in order."""
        by_line = self.lines.get(path, {})
        return sorted({test for line in lines for test in by_line.get(line, ()) if test in self.green})


def baseline(suite: Suite, limit_s: float = 300.0) -> Baseline:
    """Runs all tests five times, once more with lines counted. Raises `TaskError` and `SandboxUnavailable`."""
    runs = list(suite.results([*[TestRun(limit_s=limit_s)] * RUNS, TestRun(traced=True, limit_s=2 * limit_s)]))
    done = [one for one in runs if one is not None]
    if len(done) < len(runs):
        raise TaskError(f"expected tests that end within {limit_s:.0f} s, got {len(runs) - len(done)} runs without end")
    every = set().union(*(one.green.keys() | one.red.keys() for one in done))
    green = {test: s for test, s in done[0].green.items() if all(test in one.green for one in done)}
    if len(green) < 1 / MOST_RED:
        red = next(iter(done[0].red.values()), "")[-300:]
        raise TaskError(f"expected at least {1 / MOST_RED:.0f} green tests, got {len(green)} of {len(every)}; {red}")
    lines = {path: by_line for path, by_line in done[-1].lines.items() if is_source(path)}
    if not lines:
        raise TaskError(
            "expected tests that run files of the tree; pytest itself uses an installed copy of this package"
        )
    return Baseline(
        replace(suite, warm=done[-1].modules),
        green,
        len(every) - len(green),
        lines,
        distributions(done[-1].modules),
        max(one.wall_s for one in done[:-1]),
    )


def distributions(modules: Sequence[str]) -> list[str]:
    """Installed packages that have some modules.

    >>> distributions(["msgspec.json", "os"])
    ['msgspec']
    """
    known = packages_distributions()
    return sorted({one for module in modules for one in known.get(module.partition(".")[0], ())})


def is_source(path: str) -> bool:
    """True for a Python file of the package itself.

    >>> is_source("src/idna/core.py"), is_source("tests/test_idna.py"), is_source("h11/tests/test_io.py")
    (True, False, False)
    """
    parts = PurePosixPath(path).parts
    return path.endswith(".py") and not _NOT_SOURCE & {*parts} and not parts[-1].startswith("test_")


@dataclass(frozen=True, slots=True)
class _Tried:
    """A planted fault and the run that shows which tests notice it."""

    path: str
    site: Site
    text: str
    tests: Sequence[str]


class Planting:
    """Plants faults in one package until enough are kept, all are tried or the time is over."""

    def __init__(self, name: str, base: Baseline, seed: int = 0) -> None:
        self.name = name
        self.base = base
        self.seed = seed
        self.counts = {"kept": 0, "unnoticed": 0, "everywhere": 0, "endless": 0}
        """Number of tried faults by what became of them."""

    def instances(self, most: int, limit_s: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Instance]:
        """Kept faults as instances, at most `most`. Raises `SandboxUnavailable`."""
        ends, left = clock() + limit_s, most
        candidates = self._candidates()
        while left > 0 and clock() < ends:
            waiting = [one for one, _ in zip(candidates, range(JOBS_AT_ONCE), strict=False)]
            if not waiting:
                return
            kept = list(self._kept(waiting))[:left]
            left -= len(kept)
            self.counts["kept"] += len(kept)
            yield from kept

    def _candidates(self) -> Iterator[_Tried]:
        """Faults that enough tests run, spread over functions and kinds."""
        fewest, _ = self.base.bounds
        found: list[tuple[int, str, FaultyModule, Site]] = []
        for path in sorted(self.base.lines):
            try:
                module = faulty(self.base.suite.tree[path].decode())
            except (UnicodeDecodeError, ParserSyntaxError):  # of another encoding, or of another Python
                continue
            sites = [one for one in module.sites if len(self.base.touching(path, one.lines)) >= fewest]
            found += [(turn, path, module, one) for turn, one in enumerate(spread(sites, self.seed))]
        for _, path, module, site in sorted(found, key=lambda one: one[:2]):
            if (text := module.planted(site)) is not None:
                yield _Tried(path, site, text, self.base.touching(path, site.lines))

    def _kept(self, tried: Sequence[_Tried]) -> Iterator[Instance]:
        """Instances of the faults that the right number of tests notice, and that the original solves."""
        _, most = self.base.bounds
        faulted = self.base.suite.results([self._run(one.tests, {one.path: one.text}, most) for one in tried])
        noticed = [
            (one, red) for one, result in zip(tried, faulted, strict=True) if (red := self._noticed(one, result))
        ]
        every = sorted(set().union(*(red for _, red in noticed)))
        (original,) = self.base.suite.results([self._run(every, {}, len(every))]) if every else [None]
        for one, red in noticed:
            if original is None or not red.keys() <= original.green.keys():  # they need tests that ran before them
                self.counts["unnoticed"] += 1
                continue
            yield self._instance(one, red)

    def _run(self, tests: Sequence[str], files: Mapping[str, str], most_red: int) -> TestRun:
        limit_s = _LEAST_S + _SLOWER * sum(self.base.green[test] for test in tests)
        return TestRun(files, tests, most_red, limit_s=limit_s)

    def _noticed(self, tried: _Tried, result: Tested | None) -> Mapping[str, str]:
        """The tests that notice a fault, with their reports; empty when too few or too many do."""
        fewest, most = self.base.bounds
        if result is None:
            self.counts["endless"] += 1
            return {}
        broken = len(result.red) > most or len(result.red) + len(result.green) < len(tried.tests)
        if broken or len(result.red) < fewest:
            self.counts["everywhere" if broken else "unnoticed"] += 1
            return {}
        return result.red

    def _instance(self, tried: _Tried, red: Mapping[str, str]) -> Instance:
        source = self.base.suite.tree[tried.path].decode()
        module = self.base.touching(tried.path, range(1, source.count("\n") + 2))
        digest = hashlib.sha256(tried.text.encode()).hexdigest()[:8]
        function = f"{self.name}:{tried.path}:{tried.site.function}"
        return Instance(
            instance_id=f"{self.name}.{tried.site.function}.{digest}",
            repo=self.name,
            patch=difference_of(tried.path, source, tried.text),
            FAIL_TO_PASS=sorted(red),
            PASS_TO_PASS=[test for test in module if test not in red],
            problem_statement=statement(self.name, red),
            split=split_of(function, EVAL_SHARE).value,
            path=tried.path,
            function=tried.site.function,
            packages=list(self.base.packages),
            function_lines=tried.site.last - tried.site.first + 1,
            kind=tried.site.kind,
            red_share=len(red) / len(self.base.green),
        )


def statement(name: str, red: Mapping[str, str]) -> str:
    """The problem as an agent reads it: the number of failing tests, and the errors of some."""
    count = f"{len(red)} tests fail" if len(red) > 1 else "a test fails"
    shown = [
        f"{test}\n{_error(red[test])}" for test in sorted(red, key=lambda one: (len(red[one]), one))[:_SHOWN_TESTS]
    ]
    return "\n\n".join(
        [f"In {name} {count}. Find the cause in the package's source and mend it; leave the tests as they are.", *shown]
    )


def _error(report: str) -> str:
    """The lines of a report that name the error."""
    errors = [line[1:].strip() for line in report.splitlines() if line.startswith("E ")]
    chosen = errors or report.strip().splitlines()[-_SHOWN_LINES:]
    return "\n".join(f"    {line}" for line in chosen[:_SHOWN_LINES])
