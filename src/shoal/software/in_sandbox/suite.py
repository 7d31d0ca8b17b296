"""Runs a package's tests many times; a program of the sandbox.

Each job replaces some files of the folder `tree`, and forks a process that runs pytest there. pytest is imported once,
the package anew for each job. Standard input is JSON with modules to import before and the jobs. Standard output is a
JSON list of results.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import coverage
    import pytest

TREE = os.path.abspath("tree")
_FIRST_MTIME = 1_000_000_000
_TAIL = 2000
_CHUNK = 1 << 20
_WARM = ("pytest", "_pytest.assertion.rewrite", "unittest.mock", "coverage", "decimal", "asyncio")
Lines = dict[str, dict[int, list[str]]]


@dataclass(frozen=True)
class TestRun:
    """One run of tests to be made."""

    __test__ = False  # not a test class of pytest

    files: Mapping[str, str] = field(default_factory=dict)
    """Files of the tree that have another text in this run."""
    tests: Sequence[str] | None = None
    """pytest's node ids; None runs all tests."""
    most_red: int = sys.maxsize
    """Number of red tests after which the run ends."""
    traced: bool = False
    """Whether lines are counted for each test."""
    limit_s: float = 300.0


@dataclass
class Tested:
    """The result of a run of tests."""

    code: int
    """pytest's exit code."""
    green: dict[str, float]
    """Node id -> seconds of each test that passed."""
    red: dict[str, str]
    """Node id -> end of the report of each test that failed."""
    lines: Lines
    """File -> line -> node ids of the tests that ran it."""
    modules: list[str]
    """Installed modules that were loaded."""
    wall_s: float = 0.0
    """Seconds from the start of the process to its result."""


class Recorder:
    """Plugin of pytest: the tests' results, and the test that coverage counts lines for."""

    def __init__(self, wanted: set[str] | None, most_red: int, tracer: "coverage.Coverage | None") -> None:
        self.wanted, self.most_red, self.tracer = wanted, most_red, tracer
        self.green: dict[str, float] = {}
        self.red: dict[str, str] = {}
        self.skipped: set[str] = set()

    def pytest_collection_modifyitems(self, items: "list[pytest.Item]") -> None:
        """Keeps the wanted tests. Tests of hypothesis draw anew in each run, and are left out."""
        items[:] = [
            item
            for item in items
            if (self.wanted is None or item.nodeid in self.wanted)
            and not getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        ]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Counts lines for this test from here on."""
        if self.tracer:
            self.tracer.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        """A test is red when any of its phases fails. One that skips any part is neither, as for a verdict."""
        if report.failed:
            self.green.pop(report.nodeid, None)
            self.red.setdefault(report.nodeid, report.longreprtext[-_TAIL:])
        elif report.skipped:
            self.skipped.add(report.nodeid)
            self.green.pop(report.nodeid, None)
        elif report.when == "call" and report.passed and report.nodeid not in self.skipped:
            self.green[report.nodeid] = report.duration

    def pytest_runtest_logfinish(self) -> None:
        """Ends early when more tests are red than the job allows."""
        if len(self.red) > self.most_red:
            import pytest

            pytest.exit("more red tests than wanted")


def contexts_of(tracer: "coverage.Coverage") -> Lines:
    """Per file below the tree, the tests that ran each of its lines."""
    data = tracer.get_data()
    found: Lines = {}
    for path in data.measured_files():
        lines = data.contexts_by_lineno(path)
        if any(any(contexts) for contexts in lines.values()):
            found[os.path.relpath(path, TREE)] = {line: [one for one in tests if one] for line, tests in lines.items()}
    return found


def played(job: TestRun) -> Tested:
    """The result of one job, in its own process."""
    import pytest

    tracer = None
    if job.traced:
        tracer = importlib.import_module("coverage").Coverage(data_file=None, config_file=False, source=[TREE])
        tracer.start()
    wanted = None if job.tests is None else set(job.tests)
    recorder = Recorder(wanted, job.most_red, tracer)
    where = [] if wanted is None else sorted({test.partition("::")[0] for test in wanted})
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]
    options += ["--continue-on-collection-errors"]
    code = pytest.main([*options, "--rootdir", TREE, *where], plugins=[recorder])
    if tracer:
        tracer.stop()
    contexts = contexts_of(tracer) if tracer else {}
    return Tested(int(code), recorder.green, recorder.red, contexts, sorted(installed_modules()))


def installed_modules() -> set[str]:
    """Names of loaded modules outside of the tree and the standard library."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return {name for name, file in files.items() if isinstance(file, str) and "site-packages" in file}


def child(job: TestRun, writing: int) -> None:
    """Runs a job and writes its result to a pipe; never returns."""
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        with open(writing, "w") as pipe:
            json.dump(asdict(played(job)), pipe)
    finally:
        os._exit(0)


def forked(job: TestRun) -> Tested | None:
    """The result of a job; None when it took longer than its limit or left no result."""
    reading, writing = os.pipe()
    began = time.monotonic()
    if (pid := os.fork()) == 0:
        os.close(reading)
        child(job, writing)
    os.close(writing)
    said = b""
    while left := max(0.0, began + job.limit_s - time.monotonic()):
        if select.select([reading], [], [], left)[0]:
            if not (chunk := os.read(reading, _CHUNK)):
                break
            said += chunk
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it had no group yet, or left no other process
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        return replace(Tested(**json.loads(said)), wall_s=time.monotonic() - began)
    except ValueError:
        return None


def warm(modules: list[str]) -> None:
    """Imports what the package's tests import from elsewhere, so that no job needs to."""
    sys.dont_write_bytecode = False  # modules that no job replaces are compiled once
    for module in (*_WARM, *modules):
        before = set(sys.modules)
        with contextlib.suppress(Exception):  # a module may refuse to be imported first; the tests find out
            importlib.import_module(module)
        new = sys.modules.keys() - before
        if any(str(getattr(sys.modules[name], "__file__", "")).startswith(TREE) for name in new):
            for name in new:  # it needs the package itself, which each job imports anew
                del sys.modules[name]
    gc.freeze()


def main() -> None:
    """Runs the jobs in order."""
    request = json.load(sys.stdin)
    os.chdir(TREE)
    warm(request["warm"])
    results = []
    for number, job in enumerate(TestRun(**one) for one in request["jobs"]):
        kept = {}
        for path, text in job.files.items():
            with open(path, "rb") as file:
                kept[path] = (file.read(), os.stat(path))
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            # an mtime that no other content had: bytecode is cached by time and size
            os.utime(path, (_FIRST_MTIME + number, _FIRST_MTIME + number))
        result = forked(job)
        results.append(result and asdict(result))
        for path, (content, stat) in kept.items():
            with open(path, "wb") as file:
                file.write(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
