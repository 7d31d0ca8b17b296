"""Chaos: the schedule, the second judge, and a short campaign of real faults against a real run."""

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import psutil
import pytest

from benchmarks import on_path, run_bench
from benchmarks.chaos import QUICK_FAULTS, lines, next_seed, summed
from benchmarks.chaos.campaign import LAST_STEPS, Report, as_values, campaign
from benchmarks.chaos.faults import DISK, PLACE, SHIFT, false_clock, workplace
from benchmarks.chaos.schedule import LONGEST_HOLD_S, PROCESS_KINDS, Kind, Role, schedule
from benchmarks.chaos.victim import STANDSTILL_S, Delays, Victim
from benchmarks.chaos.witness import Witness
from shoal.config import parse
from shoal.errors import ConfigError
from shoal.experience.buffer import Buffer
from shoal.experience.schema import RunMeta
from shoal.types import Completion, FinishReason, Group, Message, Reward, Rollout, Task, Turn
from shoal.types import Role as Speaker

SHORT_SEED = 7293
"""It kills every process but the trainer and stops each but the sandbox; it moves the clock, locks the log, slows the
engine and sends it halves. Few of its faults cost the start of a run or an engine, which is most of the time."""


def test_a_seed_replays_its_schedule_and_another_seed_has_another_one() -> None:
    first = list(islice(schedule(3), 500))
    assert first == list(islice(schedule(3), 500))
    assert first != list(islice(schedule(4), 500))


def test_a_schedule_has_every_kind_of_fault_and_of_process() -> None:
    faults = list(islice(schedule(0), 1000))
    assert {fault.kind for fault in faults} == set(Kind)
    assert {fault.at_start for fault in faults} == {True, False}
    for kind in PROCESS_KINDS:
        assert {fault.role for fault in faults if fault.kind is kind} == set(Role)
    assert all((fault.role is None) == (fault.kind not in PROCESS_KINDS) for fault in faults)
    assert max(LONGEST_HOLD_S.values()) < STANDSTILL_S / 4, "what is held that long is no standstill of the run's own"


KILLED = """
import os, signal
from benchmarks.chaos.faults import small_disk, workplace
with workplace() as place, small_disk(place):
    print(place, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_campaign_removes_the_folder_and_the_disk_that_a_killed_one_left() -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], env=on_path(os.environ), capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    left = Path(killed.stdout.strip())
    assert left.name.startswith(PLACE)
    assert (left / DISK).exists()
    with workplace() as place:
        assert place.is_dir()
        assert not left.exists()
    assert not place.exists()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_wall_clock_of_a_process_follows_the_file_and_its_waits_do_not(tmp_path: Path) -> None:
    variables = false_clock(tmp_path)
    (tmp_path / "clock").write_bytes(SHIFT.pack(-86400))
    waits = "import threading, time; print(threading.Event().wait(0.01), time.time(), time.monotonic())"
    said = subprocess.run(
        [sys.executable, "-c", waits], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    waited, wall_s, monotonic_s = said.stdout.split()
    assert waited == "False"
    assert time.time() - 86400 - 60 < float(wall_s) < time.time() - 86400
    assert float(monotonic_s) <= time.monotonic()


BUSY = "import os\nos.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\nwhile True: pass"
IDLE = "import time; time.sleep(600)"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count delays")
def test_waiting_for_a_processor_is_told_from_waiting_for_an_event() -> None:
    children = [subprocess.Popen([sys.executable, "-c", code]) for code in (BUSY, BUSY, IDLE, IDLE)]
    try:
        first, second, idle, ended = (psutil.Process(child.pid) for child in children)
        children[-1].kill()
        children[-1].wait()
        wanting, waiting = Delays(), Delays()
        for _ in range(2):  # in the first round the idle one starts, for which it wants a processor too
            wanting.waited_s = waiting.waited_s = 0.0
            while wanting.waited_s < 1.0:
                time.sleep(0.1)
                wanting.look(lambda: [first, second])
                waiting.look(lambda: [idle, ended])
        assert waiting.waited_s < wanting.waited_s
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_several_runs_add_up(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    assert next_seed(lines(results)) == 0
    reports = [Report(4, 2, {"kill main": 2}, audit_ok=True), Report(5, 3, {"kill main": 1, "clock": 2}, lost=1)]
    results.write_text("".join(json.dumps(as_values(report)) + "\n" for report in reports))
    assert next_seed(lines(results)) == 6
    total = summed(lines(results))
    assert total["faults"] == 5
    assert total["lost"] == 1
    assert total["kinds"] == {"clock": 2, "kill main": 3}
    assert total["audit_ok"] is False
    assert total["seeds"] == [4, 5]


def test_options_of_chaos_are_refused_for_others() -> None:
    with pytest.raises(ConfigError, match="expected no --minutes for cli"):
        run_bench("cli", quick=True, minutes=1.0)


def rollout(name: str, version: int) -> Rollout:
    drawn = Completion((1, 2), (-0.5, -0.5), (version, version), FinishReason.STOP)
    return Rollout(name, (Message(Speaker.USER, "?"),), (Turn((1,), drawn),), Reward(1.0))


async def trained(run_dir: Path, steps: int) -> None:
    """A log of so many steps, of one group each."""
    buffer = Buffer.open(run_dir, RunMeta(1, "drop", 1, 1), max_running=4, resume=False)
    for step in range(steps):
        admitted = await buffer.admit(f"g{step}", "a")
        rollouts = tuple(rollout(f"g{step}/{i}", admitted) for i in range(2))
        await buffer.add(Group(f"g{step}", Task(f"g{step}", "a", ()), rollouts, admitted))
        (group,) = await buffer.take(1, step)
        await buffer.consumed(step, step, [group.id], version_after=step + 1)
        buffer.on_loaded(step + 1)
        if step == 2:
            await buffer.archive(1)
    await buffer.close()


def edited(run_dir: Path, statement: str) -> None:
    with sqlite3.connect(run_dir / "log.sqlite") as connection:
        connection.execute(statement)


def seen(run_dir: Path) -> Witness:
    witness = Witness("drop", 1)
    witness.look(run_dir)
    assert witness.lost == witness.doubled == witness.stale == []
    return witness


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("DELETE FROM groups WHERE group_id = 'g4'", "lost"),
        ("DELETE FROM started WHERE group_id = 'g4'", "lost"),
        ("DELETE FROM steps WHERE step = 3", "lost"),
        ("DELETE FROM consumed WHERE step = 3", "lost"),
        ("UPDATE rollouts SET body = zeroblob(9) WHERE finished_seq = 5 AND position = 0", "lost"),
        ("INSERT INTO consumed VALUES (1, 9, 0, 4, 0, 0)", "doubled"),
        ("INSERT INTO ended VALUES ('g4', 'dropped', 'stale', 2)", "doubled"),
        ("UPDATE steps SET version = version + 5 WHERE step = 4", "stale"),
    ],
)
def test_the_witness_sees_what_a_log_lost_repeated_or_trained_too_late(
    tmp_path: Path, statement: str, found: str
) -> None:
    asyncio.run(trained(tmp_path, 5))
    witness = seen(tmp_path)
    edited(tmp_path, statement)
    witness.look(tmp_path)
    assert getattr(witness, found)


@pytest.mark.parametrize(
    ("masked", "trained_from", "is_stale"), [(4, "NULL", False), (3, "NULL", True), (4, "4", True)]
)
def test_late_tokens_are_stale_for_the_witness_unless_all_of_them_are_masked(
    tmp_path: Path, masked: int, trained_from: str, is_stale: bool
) -> None:
    asyncio.run(trained(tmp_path, 5))
    edited(tmp_path, "UPDATE steps SET version = version + 5 WHERE step = 4")
    edited(tmp_path, f"UPDATE consumed SET masked_tokens = {masked}, trained_from = {trained_from} WHERE step = 4")
    witness = Witness("mask_tokens", 1)
    witness.look(tmp_path)
    assert bool(witness.stale) == is_stale


def test_the_witness_sees_a_step_that_the_loop_took_twice_and_one_that_the_log_lost(tmp_path: Path) -> None:
    asyncio.run(trained(tmp_path, 3))
    witness = seen(tmp_path)
    told = [{"kind": "step", "step": step} for step in (1, 2, 2, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in told))
    witness.look(tmp_path)
    assert witness.doubled == ["step 2 was taken 2 times"]
    assert witness.lost == ["step 8, which metrics.jsonl tells of"]


def test_a_run_that_ends_again_and_again_without_a_step_stands_still(tmp_path: Path) -> None:
    nothing = {"run_dir": str(tmp_path / "run"), "model": {"path": str(tmp_path / "none")}, "tasks": [{"name": "gcd"}]}
    victim = Victim(parse(nothing), tmp_path, {}, lambda: None, most_barren=2)
    asyncio.run(victim.live())
    assert len(victim.sentences) == 2
    (why,) = victim.standstills
    assert why.startswith("no step in 2 starts")


@pytest.mark.timeout(1500)
def test_a_run_under_faults_loses_doubles_and_outdates_nothing_and_always_says_why_it_ended() -> None:
    report = asyncio.run(campaign(SHORT_SEED, 1200.0, QUICK_FAULTS))
    assert report.ok, report.evidence
    assert report.faults == QUICK_FAULTS
    assert report.resumed >= 1
    assert report.steps > LAST_STEPS
