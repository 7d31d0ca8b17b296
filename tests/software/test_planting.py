"""Software tasks from a package: kept faults, left-out tests, and both checks of each task."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from faulty_package import SOURCE, written
from shoal.errors import TaskError
from shoal.software.checking import checked
from shoal.software.formats import tasks_of
from shoal.software.in_sandbox.suite import TestRun
from shoal.software.instances import INSTANCES, Instance, package_tree
from shoal.software.planting import Baseline, Planting, Suite, make_set, statement
from shoal.workspace.changes import difference_of


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object], list[Instance]]:
    """A set of the small package: its folder, numbers and instances."""
    package = written(tmp_path_factory.mktemp("package") / "numbers")
    out = tmp_path_factory.mktemp("sets")
    numbers = make_set(str(package), out, most=100, limit_s=120, seed=0)
    lines = (out / "numbers" / INSTANCES).read_bytes().splitlines()
    return package, numbers, [msgspec.json.decode(line, type=Instance) for line in lines]


def test_red_flaky_and_drawing_tests_are_in_no_task(made: tuple[Path, dict[str, object], list[Instance]]) -> None:
    _, numbers, instances = made
    assert (numbers["tests"], numbers["left_out"]) == (25, 2)
    named = {test.partition("::")[2].partition("[")[0] for one in instances for test in one.FAIL_TO_PASS}
    assert named
    assert named <= {"test_clipped", "test_total", "test_endless"}
    assert not {"test_red", "test_flaky", "test_drawn", "TestBackends::test_partly_skipped"} & {
        test.partition("::")[2] for one in instances for test in one.PASS_TO_PASS
    }


def test_each_task_turns_a_fifth_of_the_tests_red_at_most(
    made: tuple[Path, dict[str, object], list[Instance]],
) -> None:
    _, numbers, instances = made
    assert len(instances) == numbers["tasks"] == numbers["kept"]
    assert all(1 <= len(one.FAIL_TO_PASS) <= 5 for one in instances)
    assert {one.function for one in instances} <= {"clipped", "total", "endless"}
    assert numbers["endless"]  # `while number > 0` without its last line


def test_the_original_solves_each_task_and_the_fault_does_not(
    made: tuple[Path, dict[str, object], list[Instance]],
) -> None:
    package, _, instances = made
    _, tree = package_tree(str(package))
    for one in instances[:3]:
        (fault,) = Suite(patched(tree, one)).results([TestRun(tests=[*one.FAIL_TO_PASS, *one.PASS_TO_PASS])])
        (original,) = Suite(tree).results([TestRun(tests=[*one.FAIL_TO_PASS, *one.PASS_TO_PASS])])
        assert fault is not None
        assert original is not None
        assert sorted(fault.red) == one.FAIL_TO_PASS
        assert sorted(fault.green) == sorted(one.PASS_TO_PASS)
        assert not original.red


def patched(tree: dict[str, bytes], instance: Instance) -> dict[str, bytes]:
    """The tree with an instance's only hunk applied by hand: an independent reading of the patch."""
    text = tree[instance.path].decode()
    _, _, _, *lines = instance.patch.splitlines()
    before = "\n".join(line[1:] for line in lines if line[0] in " -")
    after = "\n".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(before) == 1
    return {**tree, instance.path: text.replace(before, after).encode()}


def test_faults_of_one_function_are_of_one_split(made: tuple[Path, dict[str, object], list[Instance]]) -> None:
    _, _, instances = made
    assert len({(one.function, one.split) for one in instances}) == len({one.function for one in instances})


def test_a_statement_has_the_errors_and_not_the_fault(made: tuple[Path, dict[str, object], list[Instance]]) -> None:
    _, _, instances = made
    for one in instances:
        assert one.FAIL_TO_PASS[0].partition("[")[0] in one.problem_statement
        assert "assert" in one.problem_statement
        assert one.function_lines < 10
    assert "a test fails" in statement("numbers", {"tests/test_a.py::test_b": "E   AssertionError"})


def test_a_set_is_read_as_instances_of_swe_smith(made: tuple[Path, dict[str, object], list[Instance]]) -> None:
    _, numbers, instances = made
    tasks = list(tasks_of(Path(str(numbers["folder"]))))
    assert len(tasks) == len(instances)
    assert asyncio.run(checked(tasks[0])).is_sound


def test_a_file_in_another_encoding_or_of_another_python_is_left_out() -> None:
    source = b"def f(a):\n    return a + 1\n"
    tree = {"a.py": b"# caf\xe9\n" + source, "b.py": source, "c.py": b"print 'x'\n" + source}
    lines = {path: {number: ["t"] for number in range(1, 4)} for path in tree}
    base = Baseline(Suite(tree), {"t": 0.1}, 0, lines, (), 0.1)
    assert {one.path for one in Planting("x", base)._candidates()} == {"b.py"}


def test_a_package_without_green_tests_is_refused(tmp_path: Path) -> None:
    package = written(tmp_path / "package")
    (package / "tests" / "test_numbers_of.py").write_text("def test_one(): assert False")
    with pytest.raises(TaskError, match="expected at least 5 green tests, got 0 of 1"):
        make_set(str(package), tmp_path / "out", most=1, limit_s=1, seed=0)


def test_a_set_is_never_written_over(made: tuple[Path, dict[str, object], list[Instance]], tmp_path: Path) -> None:
    package, _, _ = made
    (tmp_path / "numbers").mkdir()
    with pytest.raises(TaskError, match="expected no folder"):
        make_set(str(package), tmp_path, most=1, limit_s=1, seed=0)


def test_a_difference_has_the_form_of_git() -> None:
    after = SOURCE.replace("number > most", "number >= most")
    assert difference_of("a.py", SOURCE, after).splitlines()[:2] == ["--- a/a.py", "+++ b/a.py"]
    assert difference_of("a.py", "x", "y").endswith(
        "-x\n\\ No newline at end of file\n+y\n\\ No newline at end of file\n"
    )
    assert json.dumps(difference_of("a.py", "x\x0cy\n", "x\x0cz\n")).count("\\n") == 5
