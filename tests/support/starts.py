"""Finds the tests that start a process, a server or a browser, by following names from each test to what starts one.

A test reaches the definitions that its body, decorators and fixtures name, and all that these name in turn, in tests/,
tools/, benchmarks/, examples/, experiments/ and src/. Annotations do not count. A definition that is registered at
another (`@app.command()`) counts for that one.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

STARTERS = (
    *("subprocess.", "asyncio.create_subprocess", "multiprocessing.", "torch.multiprocessing.", "os.fork"),
    *("os.posix_spawn", "uvicorn.Server", "asyncio.start_server", "nbclient.", "ray.", "benchmarks.run_bench"),
    "runpy.run_path",
)
"""Beginnings of the names that start something; `run_bench` and `run_path` run a module of a computed name."""
ROOT = Path(__file__).parents[2]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Definition: TypeAlias = tuple[str, str]
"""A module and a name in it; the module is "" for names of other packages."""


def starting(files: Iterable[Path]) -> list[str]:
    """The tests of these files that start something, as node ids without parameters."""
    return [
        f"{file.relative_to(ROOT)}::{name}" for file in files for name in _tests_of(file) if starts(file.stem, name)
    ]


def starts(module: str, name: str) -> bool:
    """Whether a definition reaches one of `STARTERS`."""
    if not (file := _file(module)) or name not in _module(file).used:
        raise KeyError(f"{module} defines no {name}")
    seen = todo = {(module, name)}
    while todo:
        todo = {reached for one in todo for reached in _reached(*one)} - seen
        if any(".".join(one).lstrip(".").startswith(STARTERS) for one in todo):
            return True
        seen = seen | todo
    return False


def _tests_of(file: Path) -> Iterator[str]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, DEFINITIONS) and node.name.lower().startswith("test"):
            yield node.name


@cache
def _test_modules() -> dict[str, Path]:
    return {path.stem: path for path in (ROOT / "tests").rglob("*.py")}


@cache
def _file(module: str) -> Path | None:
    """The file of a module of this repository."""
    if module in _test_modules():
        return _test_modules()[module]
    top, *_ = parts = module.split(".")
    if top not in ("shoal", "benchmarks", "examples", "experiments"):
        tool = ROOT / "tools" / f"{module}.py"
        return tool if tool.is_file() else None
    path = (ROOT / "src" if top == "shoal" else ROOT).joinpath(*parts)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


class _Module:
    """The names that a module imports, and those that each of its definitions uses."""

    def __init__(self, file: Path) -> None:
        tree = ast.parse(file.read_text())
        self.imported: dict[str, str] = {}
        self.used: dict[str, set[str]] = defaultdict(set)
        in_tests = "tests" in file.relative_to(ROOT).parts[:1]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.imported |= {each.asname or each.name.partition(".")[0]: each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        registered: list[tuple[str, str]] = []
        for node in tree.body:
            if isinstance(node, DEFINITIONS):
                self.used[node.name].update(_names(node, in_tests))
                registered += [
                    (name.partition(".")[0], node.name) for each in node.decorator_list for name in _names(each, False)
                ]
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                names = set(_names(node, False))
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for name in _names(target, False):
                        self.used[name].update(names)
        for at, name in registered:
            if at in self.used:
                self.used[at].add(name)


_module = cache(_Module)


def _names(node: ast.AST, with_arguments: bool) -> Iterator[str]:
    """Names, dotted where attributes follow, outside annotations; the arguments of a test are its fixtures."""
    todo = [node]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name | ast.Attribute) and "(" not in (dotted := ast.unparse(node)):
                yield dotted
            else:
                todo.append(node.value)
        elif isinstance(node, ast.arguments):
            todo += [default for default in (*node.defaults, *node.kw_defaults) if default]
            if with_arguments:
                yield from (each.arg for each in (*node.args, *node.kwonlyargs))
        elif isinstance(node, FUNCTIONS):
            todo += [*node.decorator_list, node.args, *node.body]
        elif isinstance(node, ast.AnnAssign):
            todo += [node.target, *filter(None, [node.value])]
        else:
            todo += ast.iter_child_nodes(node)


@cache
def _reached(module: str, name: str) -> frozenset[Definition]:
    """What a definition names."""
    file = _file(module)
    return frozenset(filter(None, map(partial(_meant, module), _module(file).used[name]))) if file else frozenset()


@cache
def _meant(module: str, name: str) -> Definition | None:
    """The definition that a name means in a module, through imports."""
    file = _file(module)
    assert file, module
    head, _, rest = name.partition(".")
    if head in _module(file).used:
        return module, head
    if head in _module(file).imported:
        return _found(f"{_module(file).imported[head]}.{rest}".rstrip("."))
    fixtures = _test_modules()["conftest"]
    return ("conftest", head) if file.is_relative_to(ROOT / "tests") and head in _module(fixtures).used else None


def _found(name: str) -> Definition | None:
    """The definition of a dotted name: in the longest module that it begins with, or in another package."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        if _file(module):
            return _meant(module, ".".join(parts[count:]))
    return None if _file(name) else ("", name)
