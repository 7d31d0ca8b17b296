"""Two texts that run in sandboxes: `solution` beside a program, and `judge` beside the tests of one."""

from functools import cache
from pathlib import Path


@cache
def source(part: str) -> str:
    """The text of `solution` or `judge`, which needs nothing but the standard library, and pytest for pytest files."""
    return (Path(__file__).parent / f"{part}.py").read_text()
