"""Finds which test runs which line, in its own process and in those that it starts: measured once for each test file.

A line is known by its function and its text, so that what was measured outlives a move to another place of the file.
"""

import ast
import json
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import coverage
import pytest

TEST = "MUTANTS_TEST"
"""The environment variable that names the test, for the processes that it starts."""
FILE_S = 400.0
"""A test file that takes longer is not measured."""
SETTINGS = """
[run]
data_file = {folder}/data
include = {include}
parallel = true
patch = _exit, fork
disable_warnings = no-data-collected, module-not-measured, module-not-imported, no-ctracer
context = ${{MUTANTS_TEST-}}
"""
OWN_LINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@cache
def places(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """The function of each line of a source, and the first and last line of its statement."""
    count = text.count("\n") + 2
    functions, spans = [""] * count, [(line, line) for line in range(count)]

    def walk(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = f"{inside}.{child.name}".lstrip(".") if isinstance(child, OWN_LINES) else inside
            if isinstance(child, ast.stmt):
                body = getattr(child, "body", None)
                last = max(child.lineno, body[0].lineno - 1) if body else child.end_lineno or child.lineno
                for line in range(child.lineno, (child.end_lineno or child.lineno) + 1):
                    functions[line] = name
                spans[child.lineno : last + 1] = [(child.lineno, last)] * (last + 1 - child.lineno)
            walk(child, name)

    walk(ast.parse(text), "")
    return functions, spans


def keys(text: str, lines: Iterable[int]) -> list[str]:
    """Names of lines of a source that last while function and text do, each with its function first."""
    functions, rows = places(text)[0], text.splitlines()
    return [f"{functions[n]}|{blake2b(rows[n - 1].strip().encode(), digest_size=4).hexdigest()}" for n in lines]


class Timer:
    """A plugin of pytest that names the running test for the lines it covers, and keeps seconds and failures."""

    def __init__(self, folder: Path) -> None:
        """Begins to measure, with what `folder`/rc says."""
        self._said = folder / "tests.json"
        # coverage's own .pth file reads it in each process that Python starts.
        os.environ["COVERAGE_PROCESS_START"] = str(folder / "rc")
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self._coverage = coverage.Coverage(config_file=str(folder / "rc"))
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        name = item.nodeid.partition("[")[0]
        os.environ[TEST] = name
        self._coverage.switch_context(name)
        began, computed = time.monotonic(), _computed_s()
        try:
            return (yield)
        finally:
            self.seconds[name] += max(_computed_s() - computed, (time.monotonic() - began) / 10)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid.partition("[")[0])

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        self._said.write_text(json.dumps({"seconds": self.seconds, "failed": sorted(self.failed)}))


def _computed_s() -> float:
    """Processor time, with that of processes that have ended: what a test takes, however busy the machine is."""
    return sum(os.times()[:4])


def measure(run: Callable[[], object], source: Path, folder: Path) -> dict[str, Any]:
    """What `run`, tests under a `Timer` of `folder`, took and covered of `source`."""
    for path in folder.glob("data*"):
        path.unlink()
    (folder / "tests.json").write_text('{"seconds": {}, "failed": []}')
    run()
    covers: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in folder.glob("data*"):
        data = coverage.CoverageData(basename=str(path))
        try:
            data.read()
        except (coverage.exceptions.DataError, sqlite3.Error):
            continue  # of a process that was killed as it wrote
        for file in data.measured_files():
            module = Path(file).relative_to(source)
            text = Path(file).read_text()
            rows = text.count("\n") + 1  # data of a killed process may name others
            by_line = {line: tests for line, tests in data.contexts_by_lineno(file).items() if line <= rows}
            for key, contexts in zip(keys(text, by_line), by_line.values(), strict=True):
                covers[str(module)][key].update(test.rpartition("|")[2] for test in contexts)
    named = {
        module: {key: sorted(tests - {""}) for key, tests in lines.items() if tests - {""}}
        for module, lines in covers.items()
    }
    return {**json.loads((folder / "tests.json").read_text()), "covers": named}


def prepare(folder: Path, source: Path, rooms: Iterable[str]) -> None:
    """Writes what the processes of the tests read to measure themselves."""
    folder.mkdir(parents=True)
    (folder / "rc").write_text(
        SETTINGS.format(folder=folder, include=", ".join(f"{source / room}/*" for room in rooms))
    )


class Coverage:
    """Which tests run which line, and their seconds; each test file is measured once for each text that it has."""

    def __init__(self, measure: Callable[[str], dict[str, Any]], root: Path) -> None:
        """Reads what earlier runs measured below `root`."""
        self._measure = measure
        self._root = root
        self._path = root / "build" / "mutants_coverage.jsonl"
        lines = self._path.read_text().splitlines() if self._path.is_file() else []
        self._known = {record["tests"]: record for record in map(json.loads, lines)}
        self._files: dict[str, dict[str, Any]] = {}

    def measure(self, files: Iterable[Path]) -> None:
        """Knows the lines of these test files."""
        for name in (str(path.relative_to(self._root)) for path in files):
            stamp = f"{name} {blake2b((self._root / name).read_bytes(), digest_size=6).hexdigest()}"
            if stamp not in self._known:
                self._known[stamp] = {"tests": stamp, **self._measure(name)}
                self._path.parent.mkdir(exist_ok=True)
                with self._path.open("a") as file:
                    file.write(json.dumps(self._known[stamp]) + "\n")
            self._files[name] = self._known[stamp]

    def tests(self, module: str, text: str, line: int) -> dict[str, float]:
        """The tests that run a module's statement, failing these its function, and their seconds, quickest first."""
        functions, spans = places(text)
        first, last = spans[line]
        wanted = set(keys(text, range(first, last + 1)))
        function = f"{functions[line]}|"
        return self._running(module, wanted.__contains__) or self._running(module, lambda key: key.startswith(function))

    def whole(self, files: Iterable[Path]) -> dict[str, float]:
        """All tests of these files, as far as they are measured: for code of processes that cannot be measured."""
        found: dict[str, float] = {}
        for path in files:
            record = self._files.get(str(path.relative_to(self._root)), {"seconds": {}, "failed": []})
            found |= {test: seconds for test, seconds in record["seconds"].items() if test not in record["failed"]}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def _running(self, module: str, wanted: Callable[[str], bool]) -> dict[str, float]:
        found: dict[str, float] = {}
        for record in self._files.values():
            lines = record["covers"].get(module, {})
            names = {test for key, tests in lines.items() if wanted(key) for test in tests}
            found |= {name: record["seconds"][name] for name in names - set(record["failed"])}
        return dict(sorted(found.items(), key=lambda item: item[1]))
