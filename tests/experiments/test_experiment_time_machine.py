"""`make time_machine`, shortened: a poisoned step of a real run is found by `shoal bisect`'s search."""

import json
from pathlib import Path

from experiments.time_machine.__main__ import main


def test_the_poisoned_step_of_a_short_run_is_found_in_few_trials(tmp_path: Path) -> None:
    main(["--quick", "--only", "bisect/0", "--results", str(tmp_path)])
    (found,) = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    assert found["found_steps"] == [found["step"]]
    assert set(found["found_groups"]) <= set(found["groups"])
    assert found["trials"] <= found["most_trials"]
