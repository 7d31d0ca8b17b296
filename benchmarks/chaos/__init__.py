"""Faults at random instants of real runs: `shoal bench chaos --minutes N --json`, or `make chaos`.

Each seed is one run of very short steps, and a schedule of faults that the seed alone decides (`schedule`). They are
really done (`faults`), the run is started again whenever it ended (`victim`), and afterwards `shoal audit` and a
second judge (`witness`) say whether anything was lost, trained twice or too stale. Standing still is 60 s without a
step, another entry in the log, or an end. Seconds in which a thread of the run waits for a processor do not count, up
to 300 s in all.

The kernel decides where a process is when a signal reaches it: a seed replays the faults and their order, not every
instruction. Each run adds a line to `results.jsonl`; `python -m benchmarks.chaos` adds these up.

`earlier.jsonl` keeps what does not count: 200 faults of an earlier schedule, with two ends without a sentence (mended
since) and two standstills whose cause was not recorded, on a machine where 16 processes wanted two cores; and three
runs in which the witness took masked late tokens of groups that taught nothing for stale ones.
"""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

RESULTS = Path(__file__).with_name("results.jsonl")
CAMPAIGN_S = 300.0
"""Of one seed; a new one has another configuration."""
QUICK_FAULTS = 20
SUMMED = ("faults", "resumed", "lost", "doubled", "stale", "standstills", "unnamed", "inexact", "steps", "groups")


def measure(
    quick: bool, minutes: float | None = None, seed: int | None = None, results: Path = RESULTS
) -> dict[str, object]:
    """Sums over as many seeds as the time allows, from `seed` on, else from the first that has no line yet."""
    from benchmarks.chaos.campaign import as_values, campaign

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was mounted is taken away again
    left_s = 60 * (10.0 if minutes is None else minutes)
    number = next_seed(lines(results)) if seed is None else seed
    done: list[Mapping[str, object]] = []
    while left_s > 0:
        report = asyncio.run(campaign(number, min(left_s, CAMPAIGN_S), QUICK_FAULTS if quick else None))
        done.append(as_values(report))
        with results.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        left_s, number = left_s - report.seconds if not quick else 0.0, number + 1
    return summed(done)


def lines(results: Path) -> list[dict[str, object]]:
    """What was measured so far."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def next_seed(known: Iterable[Mapping[str, object]]) -> int:
    """The first after all that were tried."""
    return max((int(str(line["seed"])) for line in known), default=-1) + 1


def summed(reports: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Several reports as one."""
    kinds: Counter[str] = Counter()
    for report in reports:
        counts = report["kinds"]
        assert isinstance(counts, dict)
        kinds.update(counts)
    return {
        **{name: sum(int(str(report[name])) for report in reports) for name in SUMMED},
        "kinds": dict(sorted(kinds.items())),
        "audit_ok": all(report["audit_ok"] for report in reports),
        "seeds": [report["seed"] for report in reports],
    }
