"""User functions and classes: loading by name, and descriptions of their errors.

A name is `module:name` or `file.py:name`: for losses, advantages, environments, rewards, agents, sharers and takers.
"""

import asyncio
import contextvars
import hashlib
import importlib.util
import os
import sys
import sysconfig
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from importlib import import_module
from math import isfinite, nan
from pathlib import Path
from types import ModuleType
from typing import ParamSpec, SupportsFloat, TypeVar

from shoal.errors import MOST_LISTED, ConfigError, ShoalError, did_you_mean
from shoal.files import siblings

_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (os.path.dirname(__file__), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
)
MOST_CHARACTERS, MOST_SHOWN = 500, 80
MOST_THREADS = 1024
"""Calls of the user's plain functions at once; further ones wait."""

P = ParamSpec("P")
T = TypeVar("T")


def own_code(field: str, name: str) -> object:
    """Loads the object `module:name` from the current folder, as `python -m` does, or an installed package.

    `path/to/file.py:name` loads it from a file. Raises `ConfigError` that names the field.

    >>> own_code("rule", "math:tau")
    6.283185307179586
    """
    module, _, attribute = name.rpartition(":")
    if not module or not attribute:
        raise ConfigError(f"{field}: expected module:name, got {name!r}")
    _look_here()
    try:
        loaded = _from_file(module) if module.endswith(".py") else import_module(module)
    except (Exception, SystemExit) as error:  # importing runs the module, which may raise anything
        why = described(error)
        if isinstance(error, FileNotFoundError | ModuleNotFoundError) and (missing := _unfound(module, error)):
            why = missing
        raise ConfigError(f"{field}: {name!r} cannot be imported: {why}") from error
    try:
        found: object = getattr(loaded, attribute)
    except AttributeError:
        own = [one for one, value in vars(loaded).items() if not (one.startswith("_") or isinstance(value, ModuleType))]
        hint = did_you_mean(attribute, own) or f"; it has {', '.join(own[:MOST_LISTED]) or 'no names'}"
        raise ConfigError(f"{field}: {module} has no {attribute!r}{hint}") from None
    return found


def _unfound(module: str, error: FileNotFoundError | ModuleNotFoundError) -> str:
    """Says that the file or module itself is missing, with the nearest name here; empty if another one is missing."""
    if isinstance(error, FileNotFoundError):
        names = [name for name in siblings(Path(module)) if name.endswith(".py")]
        is_it, sought = str(error.filename) == str(Path(module).resolve()), Path(module).name
    else:
        names = [name.removesuffix(".py") for name in siblings(Path("here")) if name.endswith(".py")]
        is_it, sought = error.name == module.partition(".")[0], module
    return f"{'file' if module.endswith('.py') else 'module'} {module} not found{did_you_mean(sought, names)}" * is_it


def source_hash(field: str, name: str) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the file that defines `module:name`. Does not import it.

    Raises `ConfigError` that names the field when there is no such file.
    """
    module = name.rpartition(":")[0]
    _look_here()
    try:
        found = None if module.endswith(".py") else importlib.util.find_spec(module)
        data = Path(found.origin if found and found.origin else module).read_bytes()
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(f"{field}: {name!r} cannot be read: {error}") from error
    return hashlib.sha256(data).hexdigest()[:16]


def name_of(field: str, given: object) -> str:
    """The name by which another process can load a user's function or class. Raises `ConfigError`.

    >>> import json
    >>> name_of("reward", json.loads)
    'json:loads'
    """
    if isinstance(given, str):
        return given
    attribute, module = str(getattr(given, "__qualname__", "")), str(getattr(given, "__module__", ""))
    if not attribute.isidentifier():
        raise ConfigError(f"{field}: expected a function at the top of a module, got {attribute or given!r}")
    if module != "__main__":
        return f"{module}:{attribute}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or not Path(file).is_file():
        raise ConfigError(
            f"{field}: {attribute!r} is in no file, so other processes cannot load it; write it into a .py file"
        )
    return f"{Path(file).resolve()}:{attribute}"


def _look_here() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def described(error: BaseException) -> str:
    """An exception of the user's code: type, message and the code's line. A `ShoalError` is its text alone.

    >>> try:
    ...     exec(compile("def boom():\\n    return 1 / 0\\nboom()", "mine.py", "exec"))
    ... except ZeroDivisionError as error:
    ...     described(error)
    'ZeroDivisionError: division by zero (mine.py:2 in boom)'
    """
    what = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]
    if not isinstance(error, ShoalError | SyntaxError):  # the text of a SyntaxError names file and line
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
        what += f" ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})" if own else ""
    return what.encode(errors="replace").decode()  # half of a surrogate pair can be raised, but not sent


class _OwnThreads(Executor):
    """Executor whose threads are many, and end with the process: a call that hangs holds up neither."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Begins a call in a new thread; beyond `MOST_THREADS` it waits for one that ends."""
        done = Future[T]()

        def call() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(fn(*args, **kwargs))
            except BaseException as error:  # who awaits the call gets it, as from any executor
                done.set_exception(error)

        with self._lock:
            if self._threads >= MOST_THREADS:
                self._waiting.append(call)
                return done
            self._threads += 1
        try:
            threading.Thread(target=self._work, args=(call,), name="plain function", daemon=True).start()
        except RuntimeError:  # the machine has no more threads
            with self._lock:
                self._threads -= 1
            raise
        return done

    def _work(self, call: Callable[[], None]) -> None:
        while True:
            call()
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                call = self._waiting.popleft()


_THREADS = _OwnThreads()


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls the user's plain function in a separate thread, for which nothing else waits where it hangs.

    Raises what it raises, as an `Exception` that can be awaited.
    """
    call = partial(contextvars.copy_context().run, _awaitable, partial(function, *args, **kwargs))
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)


def _awaitable(call: Callable[[], T]) -> T:
    """Result of a call. A `StopIteration` would never reach who awaits it, and what is no `Exception` ends tasks."""
    try:
        return call()
    except BaseException as error:  # such as SystemExit, CancelledError and pytest's failures
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise RuntimeError(described(error)) from error


def numbers_of(given: object, count: int) -> list[float | None]:
    """Rewards from the user's function for `count` answers; None for no reward. Raises `ValueError` for other results.

    >>> numbers_of([1, None], 2)
    [1.0, None]
    """
    listed = given.tolist() if hasattr(given, "tolist") else given  # numpy and torch
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes) or len(listed) != count:
        raise ValueError(f"expected a list of {count} rewards, one for each answer, got {_result(given)}")
    return [None if value is None else _number(value) for value in listed]


def _number(value: SupportsFloat | str) -> float:
    """A value as a finite number. Raises `ValueError`, also for text."""
    try:
        number = nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = nan
    if not isfinite(number):
        raise ValueError(f"expected finite numbers or None, got {_result(value)}")
    return number


def _result(value: object) -> str:
    """Describes the result of the user's function: its kind and its beginning."""
    text = repr(value)[:MOST_SHOWN]
    if isinstance(value, str):
        return f"the text {text}"
    return f"a list of {len(value)}: {text}" if isinstance(value, list | tuple) else text


def _from_file(path: str) -> ModuleType:
    """The module in a file, loaded once for each state of the file."""
    file = Path(path).resolve()
    key = f"shoal_own_{hashlib.sha256(str(file).encode() + file.read_bytes()).hexdigest()[:16]}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, file)
        assert spec is not None, "a file that ends in .py has a loader"
        assert spec.loader is not None
        sys.modules[key] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[key])
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]
