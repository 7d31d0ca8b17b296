"""The control of a training run: the same tasks, each with the hidden tests of another one of its split.

    python examples/swe/swapped.py tasks.jsonl control.jsonl

Where this run learns as much as the real one, its reward does not come from mended faults.
"""

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from shoal.workspace.task import WorkspaceTask, tasks_in

VERDICT = ("command", "kind", "files", "red", "green", "restored", "packages", "wall_s", "all_or_nothing")


def swapped(tasks: Sequence[WorkspaceTask]) -> list[WorkspaceTask]:
    """Each task with the verdict's fields of the task that lies half a split further."""
    made = []
    for _, half in groupby(sorted(tasks, key=lambda task: task.split), key=lambda task: task.split):
        each = list(half)
        for number, task in enumerate(each):
            other = each[(number + len(each) // 2) % len(each)]
            made.append(msgspec.structs.replace(task, **{name: getattr(other, name) for name in VERDICT}))
    return made


if __name__ == "__main__":
    rows = map(msgspec.json.encode, swapped(tasks_in(Path(sys.argv[1]))))
    Path(sys.argv[2]).write_bytes(b"".join(row + b"\n" for row in rows))
