"""`make rehearsed_runs`: a real run, shortened; and the rehearsal of a recorded one, which is the same each time."""

import json
import tomllib
from pathlib import Path

from experiments.grid import finished
from experiments.rehearsed_runs.__main__ import HERE, blocks, judged, main


def test_a_recorded_run_is_rehearsed_as_the_results_say() -> None:
    plan = tomllib.loads((HERE / "experiment.toml").read_text())
    runs = finished(HERE / "results")
    _, *cells = json.loads((HERE / "results" / "results.json").read_text())
    (wanted,) = (cell for cell in cells if cell["key"] == "1/few/0")
    assert judged(runs["1/few/0"], runs["0/few/0"], plan) == wanted


def test_half_of_the_settled_blocks_gives_the_costs_and_half_judges_them() -> None:
    run = finished(HERE / "results")["1/few/0"]
    fit, judge = blocks(run, 6)
    assert fit[0]["step_s"] == run["step_s"][12:18]  # type: ignore[index]
    assert judge[0]["step_s"] == run["step_s"][18:24]  # type: ignore[index]
    assert abs(len(fit) - len(judge)) <= 1


def test_a_real_run_is_judged(tmp_path: Path) -> None:
    main(["--quick", "--results", str(tmp_path)])
    seeds, *cells = json.loads((tmp_path / "results.json").read_text())
    assert seeds["seed 0"]["configs"] == len(cells) == 2
    assert all(cell["steps_per_s"] > 0 for cell in cells)
