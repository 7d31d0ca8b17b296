"""`make time_machine`, shortened: a poisoned step of a real run is found by `shoal bisect`'s search."""

import json
from pathlib import Path
from typing import Any

from experiments.time_machine.__main__ import main


def test_the_poisoned_step_of_a_short_run_is_found_in_few_trials(tmp_path: Path) -> None:
    """A run differs each time, and one poison of twenty hides behind later steps: the next one may be found."""
    results, found = tmp_path / "runs.jsonl", dict[str, Any]()
    for seed in range(3):
        main(["--quick", "--only", f"bisect/{seed}", "--results", str(tmp_path)])
        found = json.loads(results.read_text().splitlines()[-1])
        if found["found_steps"] == [found["step"]]:
            break
    assert found["found_steps"] == [found["step"]]
    assert set(found["found_groups"]) <= set(found["groups"])
    assert found["trials"] <= found["most_trials"]
