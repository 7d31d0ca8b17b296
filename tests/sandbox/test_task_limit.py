"""Processes of programs that keep root's user id, which the kernel exempts from RLIMIT_NPROC."""

import os
from pathlib import Path

import pytest

from shoal.sandbox.program import Backend, Program, ProgramLimits
from shoal.sandbox.runner import run, why_not
from shoal.sandbox.task_limit import hierarchy, is_exempt, task_group

FORKS = """
import os, time
made = 0
try:
    while made < 400:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except BlockingIOError:
    pass
print(made, flush=True)
"""
MOST = 16

HAS_LIMIT = is_exempt(os.geteuid()) and hierarchy() is not None
pytestmark = pytest.mark.skipif(not HAS_LIMIT, reason="needs root's control groups")


@pytest.mark.parametrize("backend", [Backend.BUBBLEWRAP, Backend.NAMESPACES])
def test_a_program_with_root_s_id_forks_as_often_as_its_limit(backend: Backend, tmp_path: Path) -> None:
    if why_not(backend):
        pytest.skip(why_not(backend))
    tmp_path.chmod(0o700)  # nobody else may read it, so the program keeps root's id
    program = Program(FORKS, packages=(tmp_path,))
    finished = run(program, ProgramLimits(processes=MOST, wall_s=30.0), backend)
    assert finished.stdout.strip() == str(MOST - 1).encode(), finished


def test_a_group_is_removed_with_its_last_process(tmp_path: Path) -> None:
    root = hierarchy()
    assert root is not None
    with task_group(4) as joined:
        assert joined is not None
        assert joined.exists()
    assert not joined.parent.exists()
