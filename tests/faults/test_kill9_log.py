"""A process that writes the log is killed again and again at random moments."""

import random
import subprocess
import sys
import time
from pathlib import Path

from shoal.experience.audit import audit
from shoal.experience.log import snapshot

WRITER = Path(__file__).with_name("log_writer.py")
KILLS = 24


def killed_writer(run_dir, seed, steps, life_s):
    """What a writer said before it was killed, `life_s` after its first word and so many steps."""
    child = subprocess.Popen([sys.executable, WRITER, run_dir, str(seed)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = ""
    while not said or said.count("consumed") < steps:
        line = child.stdout.readline()
        assert line, "the writer could not resume"
        said += line
    time.sleep(life_s)
    child.kill()
    said += child.stdout.read()
    child.stdout.close()
    child.wait()
    return [line.split() for line in said.splitlines(keepends=True) if line.endswith("\n")]


def stored(run_dir):
    """Committed groups, and those consumed by step, in order."""
    with snapshot(run_dir) as connection:
        groups = {group_id for (group_id,) in connection.execute("SELECT group_id FROM groups")}
        steps: dict[int, list[str]] = {}
        query = "SELECT step, group_id FROM consumed JOIN groups USING (finished_seq) ORDER BY step, position"
        for step, group_id in connection.execute(query):
            steps.setdefault(step, []).append(group_id)
    return groups, steps


def test_kill_9_loses_no_committed_group_and_uses_none_twice(tmp_path):
    rng = random.Random(7)
    known: set[str] = set()
    told_steps: dict[int, list[str]] = {}
    for seed in range(KILLS):
        # Of ten steps one is followed by archiving, and by another step after that.
        steps_before = 0 if seed % 4 else rng.randint(10, 40)
        for event, *words in killed_writer(tmp_path, seed, steps_before, rng.uniform(0, 0.12)):
            if event == "added":
                known.add(words[0])
            elif event == "consumed":
                assert int(words[0]) not in told_steps, "a step was taken twice"
                told_steps[int(words[0])] = words[1:]
        groups, steps = stored(tmp_path)
        assert known <= groups
        assert told_steps.items() <= steps.items()
        known, told_steps = groups, steps
        used = [group_id for ids in steps.values() for group_id in ids]
        assert len(set(used)) == len(used)
        report = audit(tmp_path)
        assert report.ok, report.sentences()
        assert report.started == report.finished + report.failed + report.dropped + report.in_flight
    assert len(told_steps) > KILLS
    assert list(told_steps) == list(range(len(told_steps)))
    assert report.dropped > 0
    assert len(list((tmp_path / "archive").glob("steps-*"))) >= 2
