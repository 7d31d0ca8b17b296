"""Two programs of ours that run in sandboxes: `solution` beside a program, and `judge` beside the tests of one."""

import marshal
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from shoal.sandbox.program import Program

_BOOT = "import marshal\nwith open('code', 'rb') as file: code = marshal.load(file)\nexec(code)"


@cache
def _code(part: str) -> bytes:
    """Compiled here, once: it would take each sandbox milliseconds, on the same Python."""
    path = Path(__file__).parent / f"{part}.py"
    return marshal.dumps(compile(path.read_bytes(), "main.py", "exec"))


def program(part: str, files: Mapping[str, bytes], *, stdin: bytes = b"", packages: tuple[Path, ...] = ()) -> Program:
    """`solution` or `judge` with these files: the standard library is enough, and pytest for pytest files."""
    return Program(_BOOT, files={**files, "code": _code(part)}, stdin=stdin, packages=packages)
