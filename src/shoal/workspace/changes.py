"""Differences of a workspace from its tree, read from outside without following the agent's links."""

import difflib
import io
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from shoal.sandbox.program import Ended, Finished
from shoal.sandbox.usage import left_in
from shoal.workspace.fork import ForkKind, Workspace
from shoal.workspace.tree import OPAQUE, Tree, walked

MOST_BYTES = 200_000
MOST_LINES = 2000
"""Bytes, and lines before and after together, of a file whose difference is shown line by line."""
MOST_FILES = 2000
"""Files of a workspace that are looked at."""
MOST_OF_ALL = 2_000_000
"""Characters of all texts that are kept from one command to the next; of later files only the length is kept."""

CACHES = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
MOST_CHARACTERS = 16_000
"""Characters of a worklog; later differences are left out."""


@dataclass(slots=True)
class Worklog:
    """Seconds, end and changes of each command in a workspace, for people."""

    workspace: Workspace
    text: str = ""
    commands: int = 0
    _before: Mapping[str, str] = field(default_factory=dict)

    def add(self, finished: Finished) -> None:
        """Notes a command's seconds, how it ended and the difference that it made."""
        self.commands += 1
        ended = "" if finished.ended is Ended.EXITED else f", {finished.ended.value.replace('_', ' ')}"
        code = f", exit code {finished.exit_code}" if finished.exit_code else ""
        noted = f"command {self.commands}: {finished.wall_s:.2f} s{ended}{code}\n"
        if len(self.text) < MOST_CHARACTERS:
            noted += self.difference()[: MOST_CHARACTERS - len(self.text)]
        self.text += noted

    def difference(self) -> str:
        """Unified difference since the last one."""
        after = files_of(self.workspace)
        found, self._before = difference(self.workspace, self._before, after), after
        return found


def files_of(workspace: Workspace) -> Mapping[str, str]:
    """Text of each file that differs from the tree, by path; empty for a removed file. Caches are left out."""
    found: dict[str, Path | None] = {}
    tree, own = workspace.tree, workspace.own / workspace.tree.place[1:]
    for path in islice(walked(own), MOST_FILES) if own.is_dir() else ():
        name, mode = str(path.relative_to(own)), path.lstat().st_mode
        if stat.S_ISCHR(mode) or (stat.S_ISDIR(mode) and _is_opaque(path)):
            found = dict.fromkeys(_names(tree, name)) | found
        elif not stat.S_ISDIR(mode):
            found[name] = path
    if workspace.kind is not ForkKind.OVERLAY:
        found = dict.fromkeys(_names(tree, "")) | found
    kept, left = dict[str, str](), MOST_OF_ALL
    for name, path_now in found.items():
        text = _text(path_now) if path_now else ""
        if CACHES.isdisjoint(Path(name).parts) and text != _text_in(tree, name):
            left -= len(text)
            kept[name] = text if left >= 0 or not text else f"{len(text)} characters\n"
    return kept


def _names(tree: Tree, folder: str) -> Iterator[str]:
    """Paths of the tree's files at a path or below it."""
    for layer in tree.layers:
        own = layer / tree.place[1:]
        top = own / folder
        for path in (top, *(() if top.is_symlink() else walked(top))):
            if path.is_file() or path.is_symlink():
                yield str(path.relative_to(own))


def _text_in(tree: Tree, name: str) -> str:
    """Text of the tree's file, from the topmost layer that has or removes it; empty for none."""
    for layer in tree.layers:
        own = layer / tree.place[1:]
        path = own / name
        folders = [one for one in path.parents if one != own and one.is_relative_to(own)]
        if any(one.is_symlink() for one in folders):  # it may lead out of the tree
            return ""
        if os.path.lexists(path):
            return _text(path)
        if any(map(_is_opaque, folders)):
            return ""
    return ""


def _is_opaque(path: Path) -> bool:
    """Whether a folder or a device of a layer of overlayfs hides what is below."""
    if not os.path.lexists(path) or path.is_symlink():
        return False
    return stat.S_ISCHR(path.lstat().st_mode) or OPAQUE in os.listxattr(path)


def _text(path: Path) -> str:
    """Text of a regular file, or a word about another; empty for none."""
    content = left_in(path, MOST_BYTES + 1)
    if content is None:
        return f"link to {os.readlink(path)}\n" if path.is_symlink() else ""
    return content.decode(errors="replace") if len(content) <= MOST_BYTES else f"{path.lstat().st_size} bytes\n"


def difference(workspace: Workspace, before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Unified difference between two results of `files_of`, of the first files where it is long."""
    names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    tree = workspace.tree
    texts = ([one[name] if name in one else _text_in(tree, name) for one in (before, after)] for name in names)
    shown = ""
    for name, (old, new) in zip(names, texts, strict=True):
        if (lines := old.count("\n") + new.count("\n")) > MOST_LINES:  # a hostile file could take minutes
            shown += f"--- a/{name}\n+++ b/{name}\n{lines} lines before and after\n"
        else:
            shown += difference_of(name, old, new)
        if len(shown) > MOST_CHARACTERS:
            break
    return shown


def difference_of(path: str, before: str, after: str) -> str:
    """Unified difference of one file, as git reads it."""
    old, new = (list(io.StringIO(text, newline="\n")) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
