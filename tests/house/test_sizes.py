"""Files have one subject each, imports are shallow, a public class name has one home. The bounds may only shrink."""

import ast
from collections import defaultdict
from collections.abc import Callable
from functools import cache

from test_layers import SOURCE, known, modules

MOST_LINES = 400
LARGER: dict[str, int] = {}
"""Files that are still larger, and the lines that they may have."""
FEW_LINES, MOST_SHORT = 40, 29
"""Fewer lines than the first make a file short; at most the second many may be, empty packages not counted."""
MOST_DEPTH = 12
"""Modules in the longest chain of imports at the top of modules; the aim is 12."""


def lines() -> dict[str, int]:
    """Lines of each file of the package."""
    return {path.relative_to(SOURCE).as_posix(): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}


def test_no_file_is_longer_than_its_bound() -> None:
    long = {name: count for name, count in lines().items() if count > LARGER.get(name, MOST_LINES)}
    assert long == {}
    assert all(lines().get(name, 0) > MOST_LINES for name in LARGER), "one is short now: take it out of LARGER"


def test_few_files_are_splinters() -> None:
    short = sorted(name for name, count in lines().items() if 1 < count < FEW_LINES)
    assert len(short) <= MOST_SHORT, short


def test_no_public_class_name_has_two_homes() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for name, source in modules():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_no_chain_of_imports_is_longer_than_its_bound() -> None:
    names = {name for name, _ in modules()}
    below = {name: {found for found in map(known(names), _eager(text)) if found} - {name} for name, text in modules()}
    assert max(map(_depth(below), below)) <= MOST_DEPTH


def _eager(source: str) -> set[str]:
    """Dotted names that a module imports when it is loaded."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _depth(below: dict[str, set[str]]) -> Callable[[str], int]:
    @cache
    def depth(name: str) -> int:
        return 1 + max(map(depth, below[name]), default=0)

    return depth
