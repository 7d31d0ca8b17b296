"""Two programs that run in sandboxes: `solution` loads the answer, `judge` runs its tests."""

import marshal
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from shoal.sandbox.program import Program

_BOOT = "import marshal\nwith open('code', 'rb') as file: code = marshal.load(file)\nexec(code)"


@cache
def _code(part: str) -> bytes:
    """The module's code, compiled once: each sandbox would spend milliseconds on it."""
    path = Path(__file__).parent / f"{part}.py"
    return marshal.dumps(compile(path.read_bytes(), "main.py", "exec"))


def program(part: str, files: Mapping[str, bytes], *, stdin: bytes = b"", packages: tuple[Path, ...] = ()) -> Program:
    """The program `solution` or `judge` with these files. Pytest files need the pytest package, others no package."""
    return Program(_BOOT, files={**files, "code": _code(part)}, stdin=stdin, packages=packages)
