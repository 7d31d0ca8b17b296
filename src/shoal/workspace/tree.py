"""Prepared trees: the files in which a task begins, built once, kept in the user's cache and named by their content."""

import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.errors import TaskError
from shoal.files import cache_directory, checksum, replaced
from shoal.sandbox.usage import remove_tree

MOST_BYTES = 8 << 30
MOST_FILES = 1_000_000
"""Size and number of files of a tree."""
PLACE = "/workspace"
"""Folder of the sandbox in which a tree's files appear, unless the task names another."""
_HOME = "shoal-home"
_RECORD, _LAYER, _UNFINISHED, _PACKED = "tree.json", "layer", ".unfinished-", "tree.tar.gz"
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_GIT_TIMEOUT_S = 600.0


OPAQUE = "user.overlay.opaque"
"""Attribute of a folder that hides the folders of its path in the layers below."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A prepared tree: read-only layers, the topmost first. Layers above the last are snapshots of workspaces."""

    digest: str
    """Hash of all names, contents and modes (BLAKE2b-256, hex)."""
    layers: tuple[Path, ...]
    tops: tuple[str, ...]
    """Top folders, each a folder of the sandbox's root."""
    place: str
    """Current directory of commands, which has the tree's files."""
    size_bytes: int
    files: int
    has_system: bool = False
    """Whether it is a whole root of a system, as unpacked from a container image."""

    @property
    def base(self) -> Path:
        """Folder of the host with the files that appear at `place`, before any workspace changed them."""
        return self.layers[-1] / self.place.strip("/")


def trees_directory() -> Path:
    """Folder of the trees, forks and packages of this user."""
    return cache_directory() / "workspaces"


def tree_of(source: Path, *, place: str = PLACE) -> Tree:
    """The tree of a directory, a tar archive, an sdist, a wheel, a git bundle or an unpacked container root.

    The only folder at the top of an archive is left out, as in an sdist. An archive that was prepared before is not
    unpacked again. Raises `TaskError`.
    """
    _check_place(place)
    try:
        if source.is_dir():
            return _built(source, place)
        key = f"{checksum(source)} {place}"
        return prepared_as(key) or prepare_as(key, _built(source, place))
    except (OSError, tarfile.TarError, zipfile.BadZipFile, subprocess.SubprocessError) as error:
        raise TaskError(f"workspace tree {source}: it cannot be prepared: {error}") from error


def tree_named(digest: str) -> Tree:
    """The tree of a digest, if the cache has it. Raises `TaskError`."""
    folder = trees_directory() / "trees" / digest
    try:
        record = msgspec.json.decode((folder / _RECORD).read_bytes(), type=_Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise TaskError(f"workspace tree {digest[:16]}: expected it in {folder.parent}, got {error}") from error
    layers = (folder / _LAYER, *(trees_directory() / "trees" / one / _LAYER for one in record.below))
    return Tree(digest, layers, record.tops, record.place, record.size_bytes, record.files, record.has_system)


class _Record(msgspec.Struct, frozen=True):
    """Record of a layer, written last: a layer without a record was never finished."""

    tops: tuple[str, ...]
    place: str
    size_bytes: int
    files: int
    has_system: bool
    below: tuple[str, ...] = ()


def prepared_as(key: str) -> Tree | None:
    """Tree that was prepared under a key before, if the cache has it."""
    pointer = _pointer(key)
    return tree_named(pointer.read_text()) if pointer.is_file() else None


def prepare_as(key: str, tree: Tree) -> Tree:
    """Keeps the tree's name under a key."""
    pointer = _pointer(key)
    pointer.parent.mkdir(parents=True, exist_ok=True)
    with replaced(pointer) as file:
        file.write_text(tree.digest)
    return tree


def _pointer(key: str) -> Path:
    return trees_directory() / "sources" / hashlib.blake2b(key.encode(errors="replace"), digest_size=16).hexdigest()


def _built(source: Path, place: str) -> Tree:
    with unfinished() as layer:
        has_system = source.is_dir() and all((source / name).is_dir() for name in ("usr", "etc", "bin"))
        inner = layer if has_system else layer / place.strip("/")
        _unpack(source, inner)
        _make_folders(source.name, layer, place)
        return kept(layer, place, has_system=has_system)


def _check_place(place: str) -> None:
    if not place.startswith("/") or {"", ".", ".."} & set(place.strip("/").split("/")):
        raise TaskError(f"workspace place: expected an absolute path such as {PLACE}, got {place!r}")


def _make_folders(name: str, layer: Path, place: str) -> None:
    """Makes the folders that each layer has. Raises `TaskError` where a link leads out of the layer."""
    for inner in (f"{_HOME}/tmp", "tmp", place.strip("/")):
        if not (layer / inner).resolve().is_relative_to(layer.resolve()):
            raise TaskError(f"workspace tree {name}: expected a folder {inner}, got a link that leads elsewhere")
        (layer / inner).mkdir(parents=True, exist_ok=True)


def pack(tree: Tree, folder: Path) -> None:
    """Writes a tree without snapshots into an empty folder, as files that travel. Raises `OSError`."""
    (folder / _RECORD).write_bytes((tree.layers[0].parent / _RECORD).read_bytes())
    with tarfile.open(folder / _PACKED, "w:gz", compresslevel=1) as archive:
        archive.add(tree.layers[0], ".")


def arrived(folder: Path, digest: str) -> Tree:
    """Keeps the tree that another host packed. Raises `TaskError` unless it has this digest."""
    try:
        record = msgspec.json.decode((folder / _RECORD).read_bytes(), type=_Record)
        with unfinished() as layer:
            with tarfile.open(folder / _PACKED) as archive:
                _bounded(digest, [member.size for member in archive])
                archive.extractall(layer, filter=_own_member)
            _check_place(record.place)
            _make_folders(digest, layer, record.place)
            found = kept(layer, record.place, has_system=record.has_system)
    except (OSError, tarfile.TarError, msgspec.MsgspecError) as error:
        raise TaskError(f"workspace tree {digest[:16]}: what came from the run cannot be kept: {error}") from error
    if found.digest != digest:
        raise TaskError(f"workspace tree {digest[:16]}: expected its files from the run, got {found.digest[:16]}")
    return found


def _own_member(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """A member that stays in the folder. Raises `TarError`; a hard link could be one to any file of this machine."""
    if not (member.isreg() or member.isdir() or member.issym()):
        raise tarfile.TarError(f"expected files, folders and symbolic links, got {member.name!r}")
    return tarfile.tar_filter(member, folder)


def discard(snapshot: Tree) -> None:
    """Removes a snapshot's own layer from the cache; no workspace may use it, and no later snapshot of its forks."""
    if len(snapshot.layers) > 1:
        (snapshot.layers[0].parent / _RECORD).unlink(missing_ok=True)
        remove_tree(str(snapshot.layers[0].parent))


@contextmanager
def unfinished() -> Iterator[Path]:
    """An empty folder in which a layer is made; what is not `kept` is removed."""
    folder = trees_directory() / "trees"
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
    try:
        (made / _LAYER).mkdir()
        yield made / _LAYER
    finally:
        shutil.rmtree(made, ignore_errors=True)


def kept(layer: Path, place: str, *, has_system: bool = False, below: Tree | None = None) -> Tree:
    """Moves a finished layer to its name; the tree of the layer, above the layers of `below`."""
    digest, size_bytes, files = _measured(layer, f"{place} {has_system} {below.digest if below else ''}")
    folders = (one.name for one in layer.iterdir() if one.is_dir() and not one.is_symlink())
    tops = below.tops if below else tuple(sorted(folders))
    names = tuple(one.parent.name for one in below.layers) if below else ()
    record = _Record(tops, place, size_bytes, files, has_system, names)
    (layer.parent / _RECORD).write_bytes(msgspec.json.encode(record))
    try:
        layer.parent.rename(trees_directory() / "trees" / digest)
    except OSError:
        if not (trees_directory() / "trees" / digest / _RECORD).is_file():  # else another process was sooner
            raise
    return tree_named(digest)


def _measured(layer: Path, head: str) -> tuple[str, int, int]:
    """Digest, bytes and number of the files of a layer."""
    total, size_bytes, count = hashlib.blake2b(head.encode(), digest_size=32), 0, 0
    for path in sorted(walked(layer)):
        status, name = path.lstat(), path.relative_to(layer)
        content = ""
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(status.st_mode):
            content = checksum(path)
            size_bytes += status.st_size
        count += 1
        modes = f"{stat.S_IFMT(status.st_mode)} {status.st_mode & 0o111}"
        if stat.S_ISDIR(status.st_mode) and OPAQUE in os.listxattr(path):  # it has other files than one that is merged
            modes += " opaque"
        total.update(f"{name}\0{modes}\0{content}\0".encode(errors="surrogateescape"))
    return total.hexdigest(), size_bytes, count


def walked(folder: Path) -> Iterator[Path]:
    """Every file, folder and link below a folder; no link is followed."""
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name) for name in (*folders, *files))


def _unpack(source: Path, target: Path) -> None:
    """Puts the files of a source into an empty folder. Raises `TaskError` and errors of the archive."""
    name = source.name
    target.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=_special)
    elif name.endswith(_ARCHIVES):
        with tarfile.open(source) as archive:
            _bounded(name, [member.size for member in archive])
            archive.extractall(target, filter="data")
    elif name.endswith((".whl", ".zip")):
        with zipfile.ZipFile(source) as wheel:
            _bounded(name, [member.file_size for member in wheel.infolist()])
            wheel.extractall(target)
    elif name.endswith(".bundle"):
        command = ["git", "clone", "-q", "--", str(source.resolve()), str(target)]
        subprocess.run(command, check=True, capture_output=True, timeout=_GIT_TIMEOUT_S)
    else:
        known = ", ".join((*_ARCHIVES, ".whl", ".zip", ".bundle"))
        raise TaskError(f"workspace tree {name}: expected a directory or one of {known}")
    top = list(target.iterdir())
    if not source.is_dir() and len(top) == 1 and top[0].is_dir() and not top[0].is_symlink():
        aside = top[0].rename(target.with_name(f"{_UNFINISHED}top"))
        target.rmdir()
        aside.rename(target)


def _bounded(name: str, sizes: list[int]) -> None:
    if sum(sizes) > MOST_BYTES or len(sizes) > MOST_FILES:
        raise TaskError(
            f"workspace tree {name}: expected at most {MOST_BYTES} bytes in {MOST_FILES} files, "
            f"got {sum(sizes)} in {len(sizes)}"
        )


def _special(folder: str, names: list[str]) -> list[str]:
    """Names in a folder that are sockets, pipes or devices."""
    modes = {name: stat.S_IFMT(os.lstat(os.path.join(folder, name)).st_mode) for name in names}
    return [name for name, mode in modes.items() if mode not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)]
