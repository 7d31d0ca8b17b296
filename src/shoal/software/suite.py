"""A package's own tests, run in the sandbox: all or some, on the tree as it is or with some files replaced."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from shoal.errors import TaskError
from shoal.sandbox.command import installed_packages
from shoal.sandbox.program import Program, ProgramLimits
from shoal.sandbox.runner import run
from shoal.software.in_sandbox.suite import Tested, TestRun

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
