"""Simulated promotions of a Version to users whose mean outcomes are known, through the real control object.

    python tests/support/promotions.py SEEDS [FIRST_SEED]

A user's outcome is 0 or 1, comes up to ten sessions later, and in some cases only for a share of the sessions. Prints a
line of JSON per case: how many seeds promoted the new Version or returned to the old one, and after how many outcomes.
"""

import json
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from statistics import median

from shoal.gateway.promotion import Promotion, Stage

MOST = 1000
"""Sessions with outcomes after which a simulation ends undecided."""
LATE = 10
CASES: Sequence[tuple[float, float, float]] = (
    *((0.8, new, 1.0) for new in (0.0, 0.3, 0.4, 0.5, 0.6, 0.7)),
    *((0.6, new, 1.0) for new in (0.2, 0.6, 0.7, 0.8, 0.9)),
    *((0.8, new, 0.3) for new in (0.4, 0.8)),
)
"""Mean outcomes of the old and the new Version, and the share of the sessions that get one."""


def simulated(old: float, new: float, reported: float, seed: int, most: int = MOST) -> dict[str, object]:
    """One promotion until its end: its stage, the outcomes until then, and those of the new Version among them."""
    rng = Random(seed)
    counts, late = [0, 0], deque[tuple[str, float]]()
    with closing(Promotion(Path(":memory:"), "old -> new", Random(rng.random()))) as promotion:
        session = 0
        while promotion.stage is Stage.TRIAL and sum(counts) < most:
            name, session = f"{session:016x}", session + 1
            is_new = promotion.is_new(name)
            if rng.random() < reported:
                late.insert(rng.randrange(len(late) + 1), (name, float(rng.random() < (new if is_new else old))))
            if len(late) > LATE:
                name, outcome = late.popleft()
                counts[promotion.is_new(name)] += 1
                promotion.report(name, outcome)
        return {"stage": str(promotion.stage), "outcomes": sum(counts), "of_new": counts[1]}


def table(seeds: Sequence[int], old: float, new: float, reported: float, most: int = MOST) -> dict[str, object]:
    """Results of one case."""
    runs = [simulated(old, new, reported, seed, most) for seed in seeds]
    ends = {str(stage): [run["outcomes"] for run in runs if run["stage"] == stage] for stage in Stage}
    returned = sorted(int(str(n)) for n in ends["returned"])
    of_new = [int(str(run["of_new"])) for run in runs if run["stage"] == "returned"]
    promoted = [int(str(n)) for n in ends["promoted"]]
    return {
        "old": old,
        "new": new,
        "reported": reported,
        "seeds": len(seeds),
        "returned": len(returned),
        "returned_within_200": sum(n <= 200 for n in returned),
        "returned_median": median(returned) if returned else None,
        "of_new_median": median(of_new) if of_new else None,
        "promoted": len(promoted),
        "promoted_median": median(promoted) if promoted else None,
        "undecided": len(ends["trial"]),
    }


if __name__ == "__main__":
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for case in CASES:
        print(json.dumps(table(range(first, first + count), *case)), flush=True)
