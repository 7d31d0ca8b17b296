"""A shortened bench of workspaces: nothing is lost, doubled or left when workers are killed."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.workspaces import _Chaos, _forks, _held, _tree


def test_nothing_is_lost_doubled_or_left_when_workers_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tree = _tree(tmp_path / "source", 20)
    report = {
        **asyncio.run(_forks(tree, 2)),
        **asyncio.run(_held(tree, 2)),
        **asyncio.run(_Chaos(tree, 8).figures(12.0)),
    }
    assert {"fork_ms", "held", "verdicts_per_s", "bytes_per_fork", "leaked_processes", "lost"} <= report.keys()
    for name in ("lost", "doubled", "wrong", "leaked_processes", "leaked_mounts", "forks_left"):
        assert report[name] == 0, report
    assert report["kills"]
    assert report["verdicts"] == report["rollouts"]
