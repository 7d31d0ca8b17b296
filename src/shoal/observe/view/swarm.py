"""A node in its swarm: its newest status, and its peers' groups compared with its own."""

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shoal.observe.runs import RunRecords
from shoal.observe.status import LATELY, lately

STATUS = Path("swarm") / "status.json"


def swarm_status(run_dir: Path) -> Mapping[str, object] | None:
    """Newest status of a node; None when the run is in no swarm."""
    try:
        status = msgspec.json.decode((run_dir / STATUS).read_bytes(), type=dict[str, object])
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    written_s = status.pop("time_s", None)
    if isinstance(written_s, int | float):
        status["written"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_s))
    return status


def influence(run: RunRecords) -> str:
    """Sentence on the contribution of peers' groups to the last steps; empty for a run that trained none."""
    groups, theirs, own = (lately(run, name) for name in ("external", "reward_external", "reward"))
    if not groups or theirs is None or own is None:
        return ""
    better = "above" if theirs > own else "below" if theirs < own else "equal to"
    return (
        f"Over the last {min(LATELY, len(run.steps))} steps a step trained {groups:.2g} groups of peers. Their "
        f"answers earned {theirs:.3f} by this node's own rewards, {better} the {own:.3f} of its own answers."
    )
