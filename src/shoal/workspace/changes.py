"""Differences of a workspace from its tree, read from outside without following the agent's links."""

import difflib
import io
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from shoal.sandbox.usage import left_in
from shoal.workspace.fork import ForkKind, Workspace
from shoal.workspace.tree import walked

MOST_BYTES = 200_000
"""Bytes of a file whose difference is shown line by line."""


def files_of(workspace: Workspace) -> Mapping[str, str]:
    """Text of each file that differs from the tree, by path; empty for a removed file."""
    found: dict[str, str] = {}
    own, base = workspace.own / workspace.tree.place[1:], workspace.tree.base
    for path in walked(own) if own.is_dir() else ():
        name, mode = str(path.relative_to(own)), path.lstat().st_mode
        if stat.S_ISCHR(mode):
            found |= {str(one.relative_to(base)): "" for one in (base / name, *walked(base / name)) if one.is_file()}
        elif not stat.S_ISDIR(mode):
            found[name] = _text(path)
    if workspace.kind is not ForkKind.OVERLAY:
        found |= {name: "" for path in walked(base) if (name := str(path.relative_to(base))) not in found}
    return {name: text for name, text in found.items() if text != _text(base / name)}


def _text(path: Path) -> str:
    """Text of a regular file, or a word about another; empty for none."""
    content = left_in(path, MOST_BYTES + 1)
    if content is None:
        return f"link to {os.readlink(path)}\n" if path.is_symlink() else ""
    return content.decode(errors="replace") if len(content) <= MOST_BYTES else f"{path.lstat().st_size} bytes\n"


def difference(workspace: Workspace, before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Unified difference between two results of `files_of`."""
    names, base = sorted({*before, *after}), workspace.tree.base
    texts = [[one[name] if name in one else _text(base / name) for one in (before, after)] for name in names]
    return "".join(difference_of(name, old, new) for name, (old, new) in zip(names, texts, strict=True))


def difference_of(path: str, before: str, after: str) -> str:
    """Unified difference of one file, as git reads it."""
    old, new = (list(io.StringIO(text, newline="\n")) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
