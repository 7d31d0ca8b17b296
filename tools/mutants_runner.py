"""Runs tests against a copy of the package in which one module is changed, each time in a fork of a warm process."""

import compileall
import gc
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from py_compile import PycInvalidationMode
from types import TracebackType
from typing import Any

import mutants_coverage
import pytest

WARM = (
    *("torch", "numpy", "pytest", "hypothesis", "pydantic", "msgspec", "aiohttp", "starlette", "uvicorn", "pyarrow"),
    "transformers.models.qwen2.modeling_qwen2",
)
"""Imported once, before the forks, since they take longer than most tests."""
TIMED_OUT = "timed out"
WARMED = "ignore:Module already imported so cannot be rewritten"
POLL_S = 0.02
CRASHES = range(-64, 0)
"""Exit codes of a process that a signal ended."""


class Runner:
    """A copy of the package that comes before the installed one, for the tests and for the processes they start."""

    def __init__(self, source: Path, folder: Path, rooms: Iterable[str] = ()) -> None:
        """Copies `source` into `folder`; measures `rooms` of it."""
        self._rooms = tuple(rooms)
        self._source = source
        self._folder = folder

    def __enter__(self) -> "Runner":
        os.environ["OMP_NUM_THREADS"] = "1"
        for name in WARM:
            __import__(name)
        for plugin in entry_points(group="pytest11"):
            plugin.load()
        shutil.copytree(self._source, self._copy, ignore=shutil.ignore_patterns("__pycache__"))
        # By hash, since two mutants of one module may have one size and one second.
        compileall.compile_dir(self._copy, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        mutants_coverage.prepare(self._measures, self._copy, self._rooms)
        gc.freeze()  # What is warm is not looked through when pytest collects garbage at its end.
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.rmtree(self._measures, ignore_errors=True)

    @property
    def _copy(self) -> Path:
        return self._folder / self._source.name

    @property
    def _measures(self) -> Path:
        return self._folder / "measures"

    @contextmanager
    def planted(self, module: str, text: str) -> Iterator[None]:
        """Has `text` in the place of a module of the copy."""
        path = self._copy / module
        before = path.read_text()
        path.write_text(text)
        try:
            yield
        finally:
            path.write_text(before)

    def coverage(self, test_file: str) -> dict[str, Any]:
        """The `seconds` of each test of a file, those that `failed`, and which of them `covers` which line."""

        def run() -> None:
            _forked(
                lambda: self._pytest([test_file], [mutants_coverage.Timer(self._measures)], examples=8),
                mutants_coverage.FILE_S,
            )

        return mutants_coverage.measure(run, self._copy, self._measures)

    def failure(self, tests: list[str], timeout_s: float, test_s: float = 300) -> str:
        """The first test that fails, "timed out" when that or one of them takes too long, or "" when all pass."""
        code = _forked(lambda: self._pytest(["-x", f"--timeout={test_s}", *tests], []), timeout_s)
        if code is None:
            return TIMED_OUT
        if code == 0:
            return ""
        text = self._said.read_text(errors="replace")
        failed = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if not failed and code not in CRASHES:
            raise RuntimeError(f"pytest on {' '.join(tests)} ended with {code}:\n{text[-2000:]}")
        if failed and "Timeout (>" in failed[0]:
            return TIMED_OUT
        return failed[0].split(" - ")[0] if failed else f"ended with {code}"

    @property
    def _said(self) -> Path:
        return self._folder / "said.txt"

    def _pytest(self, arguments: list[str], plugins: list[object], examples: int = 30) -> int:
        """Becomes pytest, in a fork."""
        out = os.open(self._said, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ["PYTHONPATH"] = str(self._folder)
        sys.path.insert(0, str(self._folder))
        import hypothesis

        # A mutant is dead at the first example that fails: the smallest one is of no use here.
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile(
            "mutants", phases=phases, database=None, deadline=None, max_examples=examples, derandomize=True
        )
        options = ["-q", "-rfE", "--tb=no", "--hypothesis-profile=mutants", "-W", WARMED]
        options.append(f"--basetemp={self._folder / 'tmp'}")
        return int(pytest.main([*options, *arguments], plugins=plugins))


def _forked(body: Callable[[], int], timeout_s: float) -> int | None:
    """The exit code of a fork that runs `body`; None when it had to be ended."""
    child = os.fork()
    if child:
        return _waited(child, timeout_s)
    code = 70
    try:
        os.setsid()
        code = body()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _waited(child: int, timeout_s: float) -> int | None:
    """The exit code of a child; None when it had to be ended. What it started ends with it."""
    deadline = time.monotonic() + timeout_s
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _end(child)
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            _end(child)
            os.waitpid(child, 0)
            return None
        time.sleep(POLL_S)


def _end(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
