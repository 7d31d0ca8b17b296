"""What runs inside the sandbox, beside the programs: joined to one text, it is the sandbox's main program."""

import re
from functools import cache
from pathlib import Path

_OWN_IMPORT = re.compile(r"^from shoal\.[^\n(]*(?:\([^)]*\))?\n", re.MULTILINE)
_PARTS = ("plumbing", "values", "tester", "driver")


@cache
def source() -> str:
    """The text of all parts, which need nothing but the standard library."""
    folder = Path(__file__).parent
    joined = "\n".join((folder / f"{part}.py").read_text() for part in _PARTS)
    return _OWN_IMPORT.sub("", joined)
