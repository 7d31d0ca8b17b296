"""The flows of docs/developers/flows.md are those of the code, and a token passes few files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import flow  # noqa: E402


@pytest.mark.parametrize("title", flow.FLOWS)
def test_each_hop_of_a_flow_is_a_call_or_names_what_its_caller_names(title: str) -> None:
    assert flow.faults(flow.FLOWS[title]) == []


@pytest.mark.parametrize(
    ("hops", "fault"),
    [
        ("run.loop:TrainLoop.gone", "run.loop has no TrainLoop.gone"),
        (
            "run.loop:TrainLoop.run\n  run.loop:TrainLoop._record_and_train",
            "run.loop:TrainLoop.run does not call _record_and_train",
        ),
        (
            "engine.server.http_client:HttpEngine.generate\n  engine.server.routes:EngineServer.score @ /nowhere",
            "HttpEngine.generate and engine.server.routes do not both name /nowhere",
        ),
    ],
)
def test_a_hop_that_the_code_does_not_take_is_found(hops: str, fault: str) -> None:
    assert flow.faults(hops) == [fault]


def test_the_files_on_the_way_of_a_token_are_counted_and_few() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "flow.py"], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["files"] == len(set(figures["list"])) <= flow.MOST_FILES
    assert figures["stays"] <= flow.MOST_STAYS
    assert all((flow.SOURCE / name).is_file() for name in figures["list"])
