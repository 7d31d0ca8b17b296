"""Tests read before they are run: the names they take from the program, and whether they can be judged. Pure.

A test's names come from its own text. Names that it binds itself, and Python's builtins, never come from the program.
No program can therefore replace a function that the test means.
"""

import ast
import builtins
import sys
from collections.abc import Iterator

from shoal.errors import TaskError

MODULE = "solution"
_BUILTIN = frozenset(dir(builtins))
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def snippet(text: str) -> tuple[str, tuple[str, ...]]:
    """Statements with the standard library's imports that they lack, and the names that they take from the program.

    Raises `TaskError` when they cannot be judged.

    >>> snippet("assert math.isclose(mean([1, 2]), max(1, 1.5))")
    ('import math\\nassert math.isclose(mean([1, 2]), max(1, 1.5))', ('mean',))
    """
    tree = _parsed(text, "code")
    bases = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    looked_into = {base.id for base in bases if isinstance(base, ast.Name)}
    free = _free(tree)
    modules = [name for name in free if name in looked_into and name in sys.stdlib_module_names]
    names = tuple(name for name in free if name not in modules)
    if not names:
        raise TaskError(f"expected a test that uses a function of the program, got {text[:60]!r}")
    return "".join(f"import {name}\n" for name in modules) + text, _functions(names)


def file_names(text: str) -> tuple[tuple[str, ...], int]:
    """Names that a test file takes from the program, and its number of tests, at least one.

    Raises `TaskError` when the file cannot be judged.

    >>> file_names("from solution import *\\nfrom pytest import approx\\ndef test_a(): assert half(3) == approx(1.5)")
    (('half',), 1)
    """
    tree = _parsed(text, "pytest")
    imported = tuple(_imported(tree))
    if not imported:
        raise TaskError("pytest: expected a file that imports from solution")
    _functions(imported)
    tests = list(_tests(tree))
    for where, test in tests:
        own_loop = any(isinstance(base, ast.Name | ast.Attribute) and "Async" in ast.unparse(base) for base in where)
        if (isinstance(test, ast.AsyncFunctionDef) and not own_loop) or _is_generator(test):
            raise TaskError(f"pytest: {test.name} is a coroutine or a generator, which pytest does not run by itself")
    named = (name for name in imported if name not in ("", "*"))
    names = dict.fromkeys((*named, *(_functions(_free(tree)) if "*" in imported else ())))
    return tuple(names), max(len(tests), 1)


def _parsed(text: str, kind: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TaskError(f"{kind}: expected Python: {error}") from None


def _functions(names: tuple[str, ...]) -> tuple[str, ...]:
    """Checks the names of functions. Raises `TaskError` for a class's name: objects stay in the sandbox."""
    for name in names:
        if name[:1].isupper() and not name.isupper():
            raise TaskError(
                f"expected tests that call functions; {name} looks like a class of the program, whose objects do not "
                'leave its sandbox: test methods with {"call": "Class.method", "args": [...], "returns": ...}'
            )
    return names


def _imported(tree: ast.Module) -> Iterator[str]:
    """Names that a file imports from the program, `*` for all."""
    aliases = {MODULE}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == MODULE:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import) and any(alias.name == MODULE for alias in node.names):
            aliases |= {alias.asname for alias in node.names if alias.name == MODULE and alias.asname}
            yield ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield node.attr


def _tests(tree: ast.Module) -> Iterator[tuple[list[ast.expr], ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every test function, with the base classes of its class."""
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        bases = node.bases if isinstance(node, ast.ClassDef) else []
        yield from ((bases, one) for one in inner if isinstance(one, _FUNCTION) and one.name.startswith("test"))


def _is_generator(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True if the function itself yields; functions inside of it may."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, (*_FUNCTION, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
    return False


def _free(tree: ast.Module) -> tuple[str, ...]:
    """Names that are used, and neither bound anywhere in the text nor builtins; in order."""
    used: dict[str, None] = {}
    bound: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used[name] = None
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=alias):
                bound.add((alias or name).partition(".")[0])
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                bound.add(name)
    return tuple(name for name in used if name not in bound | _BUILTIN and not name.startswith("__"))
