"""The user's own code, by the names that settings give it."""

import os
import sys
from importlib import import_module

from shoal.errors import ConfigError


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
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{field}: {name!r} cannot be imported: {error}") from error
    return found
