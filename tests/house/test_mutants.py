"""The suite notices faults of wiring that are planted, each alone, and the tool says so of those that it does not."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mutants  # noqa: E402
import mutants_coverage  # noqa: E402


def test_each_planted_mutant_is_killed_by_the_test_that_is_named_beside_it() -> None:
    command = [sys.executable, ROOT / "tools" / "mutants.py", "--planted"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures == {"planted": 11, "survivors": [], "wrong": []}


def test_calls_arguments_and_conditions_are_changed_one_at_a_time() -> None:
    found = {(one.function, one.before, one.after) for one in mutants.mutants_of("experience/gate.py")}
    product = "self.staleness.versions_admitted(self.version) {} self.groups_per_version"
    assert ("AdmissionGate.budget", product.format("*"), product.format("/")) in found
    each = [(one.key, one.source()) for one in mutants.mutants_of("experience/gate.py")]
    assert len({source for _, source in each}) == len({key for key, _ in each}) == len(each)
    wired = {(one.before, one.after) for one in mutants.mutants_of("run/policy.py")}
    assert ("idle", "not (idle)") in wired
    assert ("await buffer.drop(sorted(idle), UNINFORMATIVE)", "None") in wired
    assert ("buffer.drop(sorted(idle), UNINFORMATIVE)", "buffer.drop(sorted(idle), )") in wired


def test_the_tests_of_a_module_are_those_that_import_it() -> None:
    names = {path.name for path in mutants.tests_of("experience/gate.py")}
    assert "test_gate.py" in names
    assert "test_engine_sampling.py" not in names
    assert {"test_wiring.py", "test_run_redraw.py"} <= {path.name for path in mutants.tests_of("run/loop.py")}


def test_every_mutant_named_as_equivalent_is_there_and_has_a_reason() -> None:
    known = mutants.equivalents()
    modules = {key.partition(" ")[0] for key in known}
    there = {mutant.key for module in modules for mutant in mutants.mutants_of(module)}
    assert known.keys() <= there
    assert all(known.values())


def test_a_line_is_known_by_its_function_and_its_text_wherever_it_stands() -> None:
    text = "class A:\n    def f(self, x):\n        if x:\n            return g(\n x\n            )\n        return 0\n"
    assert mutants_coverage.keys("import g\n\n" + text, [6]) == mutants_coverage.keys(text, [4])
    assert mutants_coverage.keys(text, [4]) != mutants_coverage.keys(text, [7])
    functions, spans = mutants_coverage.places(text)
    assert functions[1:8] == ["A", *["A.f"] * 6]
    assert [spans[line] for line in (3, 5, 7)] == [(3, 3), (4, 6), (7, 7)]


def test_figures_count_each_mutant_that_is_still_in_the_code_once(tmp_path: Path) -> None:
    dead, alive, same, slow = mutants.ordered("rollout", 0)[:4]
    results = mutants.Results(tmp_path / "results.jsonl")
    results.add(dead, "c0", "")
    for mutant, killed_by in ((dead, "tests/x.py::test_y"), (alive, ""), (same, ""), (slow, mutants.TIMED_OUT)):
        results.add(mutant, "c1", killed_by)
    results.found["gone"] = mutants.Result("rollout/gone.py f: a -> b #0", "c0", "")
    read = mutants.Results(tmp_path / "results.jsonl")
    figures = mutants.figures_of({"rollout": [dead, alive, same, slow]}, read, {same.key: "a reason"})
    assert figures.pop("rooms") == {"rollout": {name: figures[name] for name in sorted(figures) if name != "share"}}
    assert figures == {
        "sampled": 4,
        "killed": 1,
        "survived": 1,
        "equivalent": 1,
        "timeouts": 1,
        "lived_at_first": 2,
        "share": 0.25,
    }
