"""Sets of software tasks: a package's tree, and instances in the published fields of SWE-smith or SWE-bench."""

import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal.errors import TaskError
from shoal.files import replaced
from shoal.workspace.tree import tree_of, walked

MOST_BYTES = 64 << 20
"""Size of a package's files."""
_SKIPPED = {".git", "__pycache__", ".venv", "node_modules", ".tox"}
TREE, INSTANCES = "tree", "instances.jsonl"


class Instance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One task. Without `base_commit` the fields are SWE-smith's, whose patch plants the fault; with it SWE-bench's,
    whose patch mends it."""

    instance_id: str
    repo: str
    problem_statement: str
    patch: str
    FAIL_TO_PASS: list[str]
    PASS_TO_PASS: list[str]
    base_commit: str = ""
    test_patch: str = ""
    """SWE-bench: the difference that brings the tests."""
    packages: list[str] = []
    """Installed packages that its tests import."""
    image_name: str = ""
    """Container image that the project was published with."""
    split: str = ""
    path: str = ""
    function: str = ""
    function_lines: int = 0
    kind: str = ""
    """Kind of a planted fault."""
    red_share: float = 0.0
    """Share of the package's tests that the fault turns red."""


def package_tree(source: str) -> tuple[str, dict[str, bytes]]:
    """Name and files of a folder, an archive, or a package whose source distribution pip downloads.

    Raises `TaskError`.
    """
    path = Path(source)
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-binary", ":all:", "--no-deps", "-d", folder]
            done = subprocess.run([*command, "--", source], capture_output=True, text=True, check=False)
            archives = sorted(Path(folder).glob("*.tar.gz"))
            if done.returncode or not archives:
                said = done.stderr.strip().splitlines()[-1:] or ["it has no .tar.gz"]
                expected = "expected a folder, an archive or a package with a source distribution"
                raise TaskError(f"{source}: {expected}; pip says: {said[0][:300]}")
            return package_tree(str(archives[0]))
    tree = tree_of(path)
    if tree.size_bytes > MOST_BYTES:
        raise TaskError(f"{source}: expected at most {MOST_BYTES >> 20} MiB of files; take a folder with fewer")
    inside = [(one.relative_to(tree.base), one) for one in sorted(walked(tree.base))]
    kept = [(name, one) for name, one in inside if not _SKIPPED & {*name.parts} and not one.is_symlink()]
    return path.resolve().name.removesuffix(".tar.gz"), {
        str(name): one.read_bytes() for name, one in kept if one.is_file()
    }


def write_set(folder: Path, tree: dict[str, bytes], instances: Sequence[Instance]) -> None:
    """Writes a set; the file of instances is written last."""
    folder.mkdir(parents=True)
    with tarfile.open(folder / f"{TREE}.tar.gz", "w:gz") as archive:
        for name, content in tree.items():
            member = tarfile.TarInfo(f"{folder.name}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with replaced(folder / INSTANCES) as unfinished:
        unfinished.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in instances))


def hardness(instances: Sequence[Instance]) -> dict[str, object]:
    """Numbers that say how hard a set is."""
    if not instances:
        return {}
    return {
        "held_out": sum(one.split == "eval" for one in instances),
        "functions": len({(one.path, one.function) for one in instances}),
        "red_tests_median": statistics.median([len(one.FAIL_TO_PASS) for one in instances]),
        "red_share_median": statistics.median([one.red_share for one in instances]),
        "function_lines_median": statistics.median([one.function_lines for one in instances]),
        "kinds": dict(Counter(one.kind for one in instances).most_common()),
    }
