"""Many seeds of `rehearsal_faults.py`.

    python tests/support/rehearsal_seeds.py FIRST NUMBER

Prints a line of JSON for each thousand seeds: processes, broken promises by kind, and the first seeds that broke one.
"""

import gc
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rehearsal_faults import KINDS, run_seed


def run_seeds(seeds: Sequence[int]) -> dict[str, object]:
    """Sums over many seeds, and the first seeds that broke a promise."""
    totals, lives, failing = dict.fromkeys(KINDS, 0), 0, dict[int, dict[str, list[str]]]()
    gc.disable()
    gc.freeze()  # what is imported; a dead process is a cycle, and its tasks slow the next ones until it is collected
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for index, seed in enumerate(seeds):
            world = run_seed(seed, Path(folder))
            lives += world.lives
            for kind, found in world.violations.items():
                totals[kind] += bool(found)
            if any(world.violations.values()):
                failing[seed] = {kind: found for kind, found in world.violations.items() if found}
            if index % 4 == 3:
                gc.collect()
    gc.unfreeze()
    gc.enable()
    return {"fault_seeds": len(seeds), "processes": lives, **totals, "failing": dict(list(failing.items())[:5])}


if __name__ == "__main__":
    first, end = int(sys.argv[1]), sum(map(int, sys.argv[1:3]))
    for begin in range(first, end, 1000):
        print(json.dumps({"first": begin, **run_seeds(range(begin, min(begin + 1000, end)))}), flush=True)
