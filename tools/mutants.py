"""Changes one call, argument or condition at a time and prints each change that no test notices.

`python tools/mutants.py --sample 400 --seed 0` takes the first 400 of a shuffled list of all mutants. Results are added
to a file, so a run that was ended goes on where it was. The tests of a mutant are the files that import its module, and
where none does, the files that import one of its importers. Survivors that change nothing that a test could see are
named with a reason in tools/mutants_equivalent.toml.
"""

import argparse
import ast
import json
import random
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutants_runner import Runner
from mutmut.mutation import mutators

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "shoal"
TESTS = ROOT / "tests"
ROOMS = ("run", "trainer", "experience", "swarm", "tasks", "rollout")
OTHER_TESTS = {"gpu", "vllm", "experiments", "benchmarks", "house", "support"}
"""Folders of tests that say nothing about one module of the rooms."""
EQUIVALENT = ROOT / "tools" / "mutants_equivalent.toml"
PLANTED = ROOT / "tools" / "mutants_planted.toml"
SILENT = (cst.Annotation, cst.Decorator, cst.Raise, cst.Assert, cst.Import, cst.ImportFrom)
"""Nodes without behaviour of their own: types, sentences of errors, imports."""
LOGS = {"log", "_log", "LOG", "_LOG", "logger"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    module: str
    """Path below src/shoal."""
    function: str
    line: int
    before: str
    after: str
    number: int
    """Which of the equal changes of one function."""
    index: int
    """Which change of the module."""

    @property
    def key(self) -> str:
        """A name that lasts while the function's own text does."""
        return f"{self.module} {self.function}: {self.before} -> {self.after} #{self.number}"

    def source(self) -> str:
        """The whole module with the change; "" when that is no Python."""
        tree, found = changes_of(self.module)
        node, changed, _, _ = found[self.index]
        replaced = tree.deep_replace(node, changed)
        assert isinstance(replaced, cst.Module)
        try:
            compile(replaced.code, self.module, "exec")
        except SyntaxError:
            return ""
        return replaced.code


def negated(node: cst.BaseExpression) -> Iterable[cst.BaseExpression]:
    """The opposite of a condition."""
    inner = node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield cst.UnaryOperation(cst.Not(whitespace_after=cst.SimpleWhitespace(" ")), inner)


def without_call(node: cst.Expr) -> Iterable[cst.Expr]:
    """A statement that is a call, and calls nothing."""
    value = node.value.expression if isinstance(node.value, cst.Await) else node.value
    if isinstance(value, cst.Call):
        yield node.with_changes(value=cst.Name("None"))


OPERATORS: mutators.OPERATORS_TYPE = [
    (cst.Expr, without_call),
    (cst.Call, mutators.operator_arg_removal),
    (cst.Name, mutators.operator_name),
    (cst.UnaryOperation, mutators.operator_remove_unary_ops),
    (cst.CSTNode, mutators.operator_keywords),
    (cst.CSTNode, mutators.operator_swap_op),
]


Change: TypeAlias = tuple[cst.CSTNode, cst.CSTNode, str, int]
"""A node, what replaces it, its function and its line."""


class Changes(cst.CSTVisitor):
    """Collects every change of a module."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        """Nothing is visited yet."""
        super().__init__()
        self.found: list[Change] = []
        self._inside: list[str] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, SILENT) or (isinstance(node, cst.Expr) and is_log(node.value)):
            return False
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._inside.append(node.name.value)
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                self._add(node, operator(node))
        if isinstance(node, cst.If | cst.While | cst.IfExp | cst.CompIf):
            self._add(node.test, negated(node.test))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
            self._inside.pop()

    def _add(self, node: cst.CSTNode, changed: Iterable[cst.CSTNode]) -> None:
        if not self._inside:
            return  # constants and tables
        position = self.get_metadata(PositionProvider, node, None)
        for one in changed:
            self.found.append((node, one, ".".join(self._inside), position.start.line if position else 0))


def is_log(value: cst.BaseExpression) -> bool:
    """Whether an expression writes to a log of the process."""
    return (
        isinstance(value, cst.Call)
        and isinstance(value.func, cst.Attribute)
        and isinstance(value.func.value, cst.Name)
        and value.func.value.value in LOGS
    )


@cache
def changes_of(module: str) -> tuple[cst.Module, list[Change]]:
    """A module's tree and all its changes, in the order of its text."""
    wrapper = MetadataWrapper(cst.parse_module((SOURCE / module).read_text()), unsafe_skip_copy=True)
    visitor = Changes()
    wrapper.visit(visitor)
    return wrapper.module, visitor.found


def mutants_of(module: str) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of its text."""
    tree, found = changes_of(module)
    numbers: Counter[tuple[str, str, str]] = Counter()
    for index, (node, changed, function, line) in enumerate(found):
        before, after = (" ".join(tree.code_for_node(part).split()) for part in (node, changed))
        number = numbers[function, before, after]
        numbers[function, before, after] += 1
        yield Mutant(module, function, line, before, after, number, index)


def modules_of(names: Iterable[str]) -> list[str]:
    """Paths below src/shoal of rooms (`trainer`) and modules (`trainer/loss`)."""
    found: list[str] = []
    for name in names:
        path = SOURCE / name
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        found += [str(file.relative_to(SOURCE)) for file in files if file.name != "__init__.py"]
    return found


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names below shoal, and helpers of tests, that a file imports; names of a package lead to their module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {_home(node.module, alias.name) for alias in node.names}
    return frozenset(found)


def _home(package: str, name: str) -> str:
    """The module in which a name that a package passes on is defined."""
    folder = SOURCE.parent / package.replace(".", "/")
    if (folder / f"{name}.py").is_file() or (folder / name).is_dir():
        return f"{package}.{name}"
    if (face := folder / "__init__.py").is_file():
        for node in ast.walk(ast.parse(face.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
                return node.module
    return package


def dotted(path: Path) -> str:
    """The name by which a module is imported."""
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)


@cache
def tests_of(module: str) -> tuple[Path, ...]:
    """The test files that import a module, themselves or by a helper; failing these, those of its importers."""
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if path.relative_to(TESTS).parts[0] not in OTHER_TESTS]
    helpers = {path.stem: path for path in (TESTS / "support").glob("*.py")}
    wanted, seen = {dotted(SOURCE / module)}, set[str]()
    while wanted:
        found = {path for path in files if _reaches(path, wanted, helpers)}
        if module.startswith("run/"):
            found |= {path for path in files if path.parent.name == "run"}
        if found:
            return tuple(sorted(found))
        seen |= wanted
        wanted = {dotted(path) for path in SOURCE.rglob("*.py") if imports(path) & wanted} - seen
    return ()


def _reaches(path: Path, wanted: set[str], helpers: dict[str, Path]) -> bool:
    names = imports(path)
    return bool(names & wanted) or any(imports(helpers[name]) & wanted for name in names & helpers.keys())


def equivalents() -> dict[str, str]:
    """The reason of each mutant that is known to change nothing that a test could see."""
    return {one["key"]: one["reason"] for one in tomllib.loads(EQUIVALENT.read_text()).get("equivalent", [])}


class Results:
    """A file of JSON lines that grows over runs: how long tests take, and which mutants lived."""

    def __init__(self, path: Path) -> None:
        """Reads what earlier runs found."""
        self._path = path
        self.mutants: dict[str, dict[str, object]] = {}
        self.seconds: dict[str, float] = {}
        for line in path.read_text().splitlines() if path.is_file() else ():
            self._take(json.loads(line))

    def _take(self, record: dict[str, object]) -> None:
        if "mutant" in record:
            self.mutants[str(record["mutant"])] = record
        else:
            self.seconds[str(record["tests"])] = float(str(record["seconds"]))

    def add(self, **record: object) -> None:
        """Keeps one record, on the disk too."""
        self._take(record)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def has(self, mutant: Mutant, tests: list[str]) -> bool:
        """Whether a mutant was killed, or lived through all these tests."""
        record = self.mutants.get(mutant.key)
        return record is not None and bool(record["killed_by"] or set(tests) <= set(record["tests"]))  # type: ignore[call-overload]


def stamped(test: str) -> str:
    """A test file with a hash of its text: what lived through it is tried again when it changes."""
    return f"{test} {blake2b((ROOT / test).read_bytes(), digest_size=6).hexdigest()}"


def measured(runner: Runner, results: Results, tests: Iterable[Path], at_most_s: float) -> dict[str, float]:
    """Seconds that each test file takes without a mutant, quickest first; those that take too long are left out."""
    found = {}
    for path in tests:
        name = stamped(str(path.relative_to(ROOT)))
        if name not in results.seconds:
            began = time.monotonic()
            failed = runner.failure([str(path.relative_to(ROOT))], at_most_s)
            results.add(tests=name, seconds=1e9 if failed else time.monotonic() - began, failed=failed)
        found[str(path.relative_to(ROOT))] = results.seconds[name]
    return {name: s for name, s in sorted(found.items(), key=lambda item: item[1]) if s <= at_most_s}


def sampled(names: list[str], sample: int, seed: int) -> list[Mutant]:
    """The first mutants of a shuffled list: a larger sample of the same seed begins with a smaller one."""
    found = [mutant for module in modules_of(names) for mutant in mutants_of(module)]
    random.Random(seed).shuffle(found)
    return found[:sample]


def hunt(arguments: argparse.Namespace) -> dict[str, object]:
    """Runs what is left of the sample; returns the figures of the whole sample."""
    results, known = Results(arguments.results), equivalents()
    chosen = sampled(arguments.modules or list(ROOMS), arguments.sample, arguments.seed)
    deadline = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder, Runner(SOURCE, Path(folder)) as runner:
        for mutant in sorted(chosen, key=lambda mutant: mutant.module):
            if time.monotonic() > deadline:
                break
            if mutant.key in known:
                continue
            tests = measured(runner, results, tests_of(mutant.module), arguments.test_seconds)
            if results.has(mutant, list(map(stamped, tests))):
                continue
            if not (source := mutant.source()):
                continue
            with runner.planted(mutant.module, source):
                killed_by = runner.failure(list(tests), 30 + 4 * sum(tests.values())) if tests else ""
            results.add(
                mutant=mutant.key, line=mutant.line, killed_by=killed_by, tests=[] if killed_by else list(tests)
            )
            print("killed  " if killed_by else "SURVIVES", mutant.key, file=sys.stderr, flush=True)
    tried = {mutant.key: mutant for mutant in chosen if mutant.key in results.mutants and mutant.key not in known}
    survivors = [mutant for key, mutant in tried.items() if not results.mutants[key]["killed_by"]]
    for mutant in sorted(survivors, key=lambda mutant: (mutant.module, mutant.line)):
        print(f"src/shoal/{mutant.module}:{mutant.line}: {mutant.key}")
    return {
        "sample": len(chosen),
        "tried": len(tried),
        "killed": len(tried) - len(survivors),
        "equivalent": sum(mutant.key in known for mutant in chosen),
        "survivors": len(survivors),
        "share": round(len(survivors) / max(1, len(tried)), 4),
    }


def planted() -> dict[str, object]:
    """Kills each mutant of tools/mutants_planted.toml by the test that is named beside it."""
    survivors, wrong = [], []
    rows = tomllib.loads(PLANTED.read_text())["planted"]
    with tempfile.TemporaryDirectory() as folder, Runner(SOURCE, Path(folder)) as runner:
        if failure := runner.failure([row["test"] for row in rows], 300):
            wrong.append(f"without a mutant: {failure}")
        for row in rows:
            text = (SOURCE / row["module"]).read_text()
            if text.count(row["before"]) != 1:
                wrong.append(f"{row['module']}: expected once {row['before']!r}, found {text.count(row['before'])}")
                continue
            with runner.planted(row["module"], text.replace(row["before"], row["after"])):
                if not runner.failure([row["test"]], 120):
                    survivors.append(f"{row['module']}: {row['before']} -> {row['after']}")
    return {"planted": len(rows), "survivors": survivors, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="rooms or modules below src/shoal, as `trainer` or `trainer/loss`")
    parser.add_argument("--sample", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no other mutant after so many minutes")
    parser.add_argument("--test-seconds", type=float, default=120, help="leave out test files that take longer")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants.jsonl")
    parser.add_argument("--planted", action="store_true", help="only the mutants of tools/mutants_planted.toml")
    arguments = parser.parse_args()
    figures = planted() if arguments.planted else hunt(arguments)
    print(json.dumps(figures))
    return 1 if figures["survivors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
