"""`shoal status` says where a run stands; SIGUSR1 says who waits where."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from buffer_values import group, open_buffer, run_group, train
from shoal.cli import main
from shoal.config import parse, to_toml
from shoal.errors import RunDirError
from shoal.observe.metrics import JsonlTracker
from shoal.observe.status import status, status_lines
from shoal.run.standstill import report_waits
from until import until


def written_run(run_dir: Path) -> None:
    """Two tasks of weights 3 and 1: three groups started of each, of one task one failed; one step trained."""

    async def groups() -> None:
        buffer = open_buffer(run_dir)
        await run_group(buffer, "a0", service="alpha")
        await run_group(buffer, "b0", service="beta")
        await train(buffer, 0, 0)
        await run_group(buffer, "a1", service="alpha")
        await buffer.admit("b1", "beta")
        await buffer.fail("b1", "the service died")
        await buffer.admit("a2", "alpha")
        await buffer.close()

    asyncio.run(groups())
    tasks = [{"name": "alpha", "weight": 3, "service": "jsonl", "path": "x"}, {"name": "beta"}]
    (run_dir / "resolved.toml").write_text(to_toml(parse({"tasks": tasks, "train": {"steps": 7}})))
    tracker = JsonlTracker(run_dir / "metrics.jsonl")
    rewards = {"reward": 0.5, "reward/alpha": 0.75, "reward/beta": 0.25, "solve_rate/alpha": 0.5}
    tracker.log(1, {"version": 0, **rewards, "tokens_per_s": 100.0})
    tracker.close()


def test_status_counts_every_group_of_every_task_and_names_reasons(tmp_path: Path) -> None:
    written_run(tmp_path)
    values = status(tmp_path)
    assert (values["steps"], values["of"], values["reward"]) == (1, 7, 0.5)
    alpha, beta = values["tasks"]["alpha"], values["tasks"]["beta"]
    assert [alpha[name] for name in ("started", "running", "waiting", "trained")] == [3, 1, 1, 1]
    assert (alpha["share"], alpha["target"], alpha["reward"], alpha["solve_rate"]) == (0.5, 0.75, 0.75, 0.5)
    assert beta["failed"] == {"the service died": 1}
    assert any("the service died" in line for line in status_lines(values))


def test_status_says_why_rollouts_failed_and_that_a_run_learns_nothing(tmp_path: Path) -> None:
    written_run(tmp_path)
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for reason in ("mine.py:2", "mine.py:9", "mine.py:2"):
        tracker.write("event", {"name": "rollout_failed", "reason": reason})
    tracker.write("event", {"name": "cannot_learn", "reason": "no group differs"})
    tracker.close()
    values = status(tmp_path)
    assert values["warnings"] == ["mine.py:9", "mine.py:2", "no group differs"]
    assert "warning: mine.py:9" in status_lines(values)


def test_the_command_prints_a_line_per_task_or_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written_run(tmp_path)
    printed = []
    for flags in ((), ("--json",)):
        with pytest.raises(SystemExit) as ended:
            main(["status", str(tmp_path), *flags])
        assert ended.value.code == 0
        printed.append(capsys.readouterr().out)
    assert "alpha" in printed[0]
    assert "beta" in printed[0]
    assert json.loads(printed[1])["tasks"]["beta"]["started"] == 2


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=str(tmp_path)):
        status(tmp_path)


def test_sigusr1_says_who_waits_where(capfd: pytest.CaptureFixture[str]) -> None:
    async def waiting() -> None:
        async def patient() -> None:
            await asyncio.Event().wait()

        with report_waits():
            task = asyncio.create_task(patient(), name="the patient one")
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGUSR1)
            await until(lambda: "the patient one waits in Event.wait" in capfd.readouterr().err)
            task.cancel()

    asyncio.run(waiting())


def test_groups_of_peers_take_nothing_from_the_shares_of_the_run_s_own_tasks(tmp_path: Path) -> None:
    async def groups() -> None:
        buffer = open_buffer(tmp_path)
        await run_group(buffer, "a0", service="alpha")
        (own,) = await buffer.take(1, 0)
        await buffer.consumed(0, 0, [own.id], version_after=1, external=[group("theirs", service="alpha", peer="reef")])
        await buffer.close()

    asyncio.run(groups())
    (tmp_path / "resolved.toml").write_text("")
    tasks = status(tmp_path)["tasks"]
    assert tasks["alpha"]["share"] == 1.0
    assert (tasks["alpha"]["trained"], tasks["alpha"]["trained_of_peers"]) == (1, 1)
