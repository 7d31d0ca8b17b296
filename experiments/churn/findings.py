"""What a node's run directory says after all that."""

from itertools import pairwise
from pathlib import Path

from shoal.experience.audit import audit
from shoal.observe.metrics import read_records


def findings_of(folder: Path) -> dict[str, dict[str, object]]:
    """Of every run in a folder, by its name."""
    return {path.parent.name: findings(path.parent) for path in sorted(folder.glob("*/metrics.jsonl"))}


def has_step(run: Path) -> bool:
    """Whether a run has trained a step."""
    path = run / "metrics.jsonl"
    return path.exists() and any(record["kind"] == "step" for record in read_records(path))


def findings(run: Path) -> dict[str, object]:
    """Steps, groups of others, the longest time without a step, and whether the log passes the audit.

    `longest_gap_s` of a killed node includes the time that it was dead and starting.
    """
    steps = [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "step"]
    times = [float(str(record["time_s"])) for record in steps]
    gaps = [later - earlier for earlier, later in pairwise(times) if later > earlier]
    report = audit(run)
    return {
        "steps": len(steps),
        "external": sum(float(str(record["external"])) for record in steps),
        "longest_gap_s": round(max(gaps, default=0.0), 2),
        "audit": report.ok,
    }
