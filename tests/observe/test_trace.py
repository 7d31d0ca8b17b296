"""`shoal trace` and `shoal export --inspect`: what they write is what their readers take."""

import asyncio
import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from view_run import GROUPS, SIZE, MadeRun

HARNESS = Path(os.environ.get("SHOAL_HARNESS_BIN", "nowhere")) / "python"


@pytest.fixture(scope="module")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace") / "run"
    folder.mkdir()

    async def main() -> None:
        run = MadeRun(folder)
        for _ in range(3):
            await run.step()
        await run.close()

    asyncio.run(main())
    return folder


def shoal(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def test_a_trace_lays_the_trainers_work_and_waits_end_to_end_in_every_step(made_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    assert "bars in" in shoal("trace", str(made_run), "--out", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    lanes = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    bars = [one for one in events if one["ph"] == "X"]
    assert {lanes[bar["tid"]] for bar in bars} >= {"trainer", "engine"}
    of_trainer = [bar for bar in bars if lanes[bar["tid"]] == "trainer" and bar["args"]["step"] == 3]
    assert [bar["name"] for bar in of_trainer] == ["waits for groups", "trains", "writes a Version"]
    assert [bar["cat"] for bar in of_trainer] == ["wait", "work", "work"]
    for before, after in pairwise(of_trainer):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=2)
    assert {one["name"] for one in events if one["ph"] == "C"} >= {"reward", "tokens_per_s"}
    assert any(one["ph"] == "i" and one["name"] == "evaluation after step 1" for one in events)


def test_a_run_without_steps_gives_a_trace_without_bars(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind":"event","name":"machine","time_s":0.0}\n')
    shoal("trace", str(tmp_path))
    assert not any(one["ph"] == "X" for one in json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


def test_an_inspect_log_has_a_sample_per_rollout_with_its_reward_and_messages(made_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "log.json"
    count = 3 * GROUPS * SIZE
    assert f"{count} rollouts" in shoal("export", str(made_run), "--inspect", str(file))
    log = json.loads(file.read_text())
    assert len(log["samples"]) == count == log["results"]["total_samples"]
    first = log["samples"][0]
    assert [sample["epoch"] for sample in log["samples"][:SIZE]] == list(range(1, SIZE + 1))
    assert first["scores"]["reward"]["value"] == 1.0
    assert first["target"] == "truth of g0-0"
    assert first["messages"][1]["tool_calls"][0]["arguments"] == {"a": 1}
    assert first["messages"][1]["content"][0]["type"] == "reasoning"
    assert first["metadata"]["consumed_step"] == 0


@pytest.mark.harness
@pytest.mark.skipif(not HARNESS.is_file(), reason="SHOAL_HARNESS_BIN names no folder; run make harnesses")
def test_inspect_reads_the_log(made_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "log.json"
    shoal("export", str(made_run), "--inspect", str(file))
    code = (
        "import sys; from inspect_ai.log import read_eval_log; log = read_eval_log(sys.argv[1]); one = log.samples[0]; "
        "print('FOUND', len(log.samples), one.scores['reward'].value, one.messages[1].tool_calls[0].function, "
        "log.results.scores[0].metrics['mean'].value)"
    )
    done = subprocess.run([HARNESS, "-c", code, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.partition("FOUND ")[2].split() == [str(3 * GROUPS * SIZE), "1.0", "add", "0.25"]
