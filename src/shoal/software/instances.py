"""Sets of software tasks: a package's tree, and instances in the published fields of SWE-smith or SWE-bench."""

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal.files import replaced

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


def write_set(folder: Path, tree: dict[str, bytes], instances: Sequence[Instance]) -> None:
    """Writes a set; the file of instances is written last."""
    for name, content in tree.items():
        path = folder / TREE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
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
