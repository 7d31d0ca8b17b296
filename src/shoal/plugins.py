"""The user's own code, by the names that settings give it, and what it raises."""

import os
import sys
import sysconfig
import traceback
from importlib import import_module
from pathlib import Path

from shoal.errors import ConfigError, ShoalError

_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        os.path.dirname(__file__),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
MOST_CHARACTERS = 500


def own_code(field: str, name: str) -> object:
    """What `module:name` names: in this folder, as with `python -m`, or installed. Raises `ConfigError` with the field.

    >>> own_code("rule", "math:tau")
    6.283185307179586
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{field}: expected module:name, got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: object = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module runs when it is imported, and raises what it will
        raise ConfigError(f"{field}: {name!r} cannot be imported: {described(error)}") from error
    return found


def described(error: BaseException) -> str:
    """An exception of the user's code: type, message, and the line of that code which it comes from; ours as they are.

    >>> try:
    ...     exec(compile("def boom():\\n    return 1 / 0\\nboom()", "mine.py", "exec"))
    ... except ZeroDivisionError as error:
    ...     described(error)
    'ZeroDivisionError: division by zero (mine.py:2 in boom)'
    """
    if isinstance(error, ShoalError):
        return str(error)
    what = f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]
    if isinstance(error, SyntaxError):
        return what  # the text names file and line
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    return f"{what} ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})" if own else what
