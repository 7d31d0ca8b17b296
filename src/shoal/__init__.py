"""Shoal post-trains language models with reinforcement learning, inside a node and between nodes.

    train         one call: a model, tasks and a reward in, a better model out
    open_policy   a model with its engine and trainer, for a loop of the caller's
    environment   makes an environment of a class that draws questions, and perhaps converses and scores
    load          the configuration in a TOML file

The other names are types of these, and errors that an environment raises. All are loaded when they are first used;
`import shoal` loads no torch.
"""

import ast
from importlib import import_module
from pathlib import Path

_HOMES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
