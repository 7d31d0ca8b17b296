"""Every hostile program is contained on every rung of this machine, and honest ones beside it are unharmed."""

import asyncio
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchmarks.hostile.arena import (
    EXPECTED,
    HONEST,
    PATIENT,
    Outside,
    faults,
    ignoring_usr1,
    limits_of,
    outside,
    run_bare,
    unjust,
)
from benchmarks.hostile.corpus import CASES, Case
from benchmarks.hostile.judged import JUDGED, TESTS
from shoal.sandbox.program import Backend, Program
from shoal.sandbox.runner import run, why_not

HONEST_BESIDE = 20
WHOLE = "SHOAL_HOSTILE" in os.environ
"""Set by `make hostile`: every judged program on every rung, and every attack without a sandbox."""
JUDGED_ON = [(kind, backend) for backend in Backend for kind in TESTS if WHOLE or kind == "code"]
JUDGED_ON += [] if WHOLE else [(kind, Backend.NAMESPACES) for kind in TESTS if kind != "code"]
AT_ONCE = 4


def tried(case: Case, backend: Backend, world: Outside) -> list[str]:
    """What went wrong with one case."""
    program = Program(world.source(case), files=dict(case.files), stdin=b"21\n")
    return faults(case, run(program, limits_of(case), backend=backend))


def honest(backend: Backend) -> list[str]:
    finished = run(HONEST, PATIENT, backend=backend)
    return [] if finished.ok and finished.stdout == EXPECTED else [f"an honest program was harmed: {finished}"]


def test_there_are_enough_cases_and_each_has_a_name() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({case.source for case in JUDGED}) >= 35
    assert len({case.name for case in JUDGED}) == len(JUDGED)


@pytest.mark.parametrize(("kind", "backend"), JUDGED_ON, ids=str)
def test_no_wrong_program_gets_or_spoils_a_reward_and_right_ones_beside_it_get_theirs(
    kind: str, backend: Backend
) -> None:
    if why_not(backend):
        pytest.skip(f"{backend.value}: {why_not(backend)}")
    assert asyncio.run(unjust(kind, backend)) == []


@pytest.mark.parametrize("backend", list(Backend), ids=lambda backend: str(backend.value))
def test_every_hostile_program_is_contained_and_honest_ones_beside_it_are_unharmed(
    backend: Backend, tmp_path: Path
) -> None:
    if why_not(backend):
        pytest.skip(f"{backend.value}: {why_not(backend)}")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with outside(tmp_path) as world, ignoring_usr1() as signals, ThreadPoolExecutor(AT_ONCE) as threads:
        work: dict[str, Future[list[str]]] = {}
        for number, case in enumerate(CASES):
            work[case.name] = threads.submit(tried, case, backend, world)
            if number % (len(CASES) // HONEST_BESIDE) == 0:
                work[f"honest {number}"] = threads.submit(honest, backend)
        found = {name: future.result() for name, future in work.items()}
        assert {name: wrong for name, wrong in found.items() if wrong} == {}
        assert world.harm() == []
        assert signals == []
        assert {child.pid for child in psutil.Process().children(recursive=True)} == before | {world.decoy.pid}
        assert sum(name.startswith("honest") for name in work) >= HONEST_BESIDE


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.bare][:: 1 if WHOLE else 5], ids=lambda case: case.name
)
def test_the_attack_succeeds_without_a_sandbox(case: Case, tmp_path: Path) -> None:
    folder, work = tmp_path / "outside", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    if os.geteuid() != 0 and case.name in ("trace_parent",):
        pytest.skip("needs root")
    with outside(folder) as world, ignoring_usr1():
        assert "BREACH" in run_bare(world.source(case), work)
