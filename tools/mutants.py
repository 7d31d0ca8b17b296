"""Changes one call, argument or condition at a time and prints each change that no test notices.

A mutant's place in the sample is a hash of its key, so it lasts while the code around it moves. Each result is kept
with its commit in benchmarks/results/mutants.jsonl: a run that was ended goes on where it was, and `--minutes 0` prints
the figures of all runs. A mutant meets the tests of its own room that run its line, the quickest first; `--again` has
what lived meet them once more, and those of other files that import its module. Survivors that change nothing that a
test could see are named with a reason in tools/mutants_equivalent.toml.
"""

import argparse
import ast
import itertools
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutants_coverage import Coverage
from mutants_runner import TIMED_OUT, Runner
from mutmut.mutation import mutators

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "shoal"
TESTS = ROOT / "tests"
SAMPLE = {"run": 92, "trainer": 62, "experience": 50, "swarm": 104, "tasks": 48, "environments": 24, "rollout": 20}
"""Mutants to try of each room, by how many it has."""
RESULTS = ROOT / "benchmarks" / "results" / "mutants.jsonl"
QUICK_S, AT_MOST_S, AGAIN_S = 1.0, 6.0, 30.0
"""Processor seconds of tests that meet a mutant, quickest first: at once, then in the first pass, and in the second."""
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
    span: tuple[int, int]
    """Begin and end of what is replaced, in the module's text."""
    text: str

    @property
    def key(self) -> str:
        """A name that lasts while the function's own text does."""
        return f"{self.module} {self.function}: {self.before} -> {self.after} #{self.number}"

    def source(self) -> str:
        """The whole module with the change; "" when that is no Python."""
        text, (begin, end) = (SOURCE / self.module).read_text(), self.span
        code = text[:begin] + self.text + text[end:]
        try:
            compile(code, self.module, "exec")
        except SyntaxError:
            return ""
        return code


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


Change: TypeAlias = tuple[cst.CSTNode, cst.CSTNode, str, CodeRange]
"""A node, what replaces it, its function and its place."""


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
        if isinstance(position, CodeRange):
            self.found += [(node, one, ".".join(self._inside), position) for one in changed]


def is_log(value: cst.BaseExpression) -> bool:
    """Whether an expression writes to a log of the process."""
    return (
        isinstance(value, cst.Call)
        and isinstance(value.func, cst.Attribute)
        and isinstance(value.func.value, cst.Name)
        and value.func.value.value in LOGS
    )


def mutants_of(module: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its text; kept for as long as the text is the same."""
    text = (SOURCE / module).read_text()
    digest = blake2b(text.encode() + Path(__file__).read_bytes(), digest_size=8).hexdigest()
    kept = ROOT / "build" / "mutants" / f"{digest}.json"
    if kept.is_file():
        return [Mutant(**{**one, "span": tuple(one["span"])}) for one in json.loads(kept.read_bytes())]
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    wrapper.visit(visitor := Changes())
    lines = [0, *itertools.accumulate(len(line) for line in text.splitlines(keepends=True))]
    numbers: Counter[tuple[str, str, str]] = Counter()
    mutants = []
    for node, changed, function, place in visitor.found:
        before, after = (" ".join(wrapper.module.code_for_node(part).split()) for part in (node, changed))
        number = numbers[function, before, after]
        numbers[function, before, after] += 1
        begin, end = (lines[at.line - 1] + at.column for at in (place.start, place.end))
        inner = changed.with_changes(lpar=[], rpar=[]) if getattr(node, "lpar", ()) else changed  # place is inside them
        code = wrapper.module.code_for_node(inner)
        mutants.append(Mutant(module, function, place.start.line, before, after, number, (begin, end), code))
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps([asdict(one) for one in mutants]))
    return mutants


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


@dataclass(slots=True)
class Result:
    """What became of a mutant."""

    mutant: str
    commit: str
    killed_by: str
    """A test, "timed out", or "" when it lives."""
    lived: bool = False
    """Whether it lived through the tests of its room when it was first tried."""


class Results:
    """A file of JSON lines, one a mutant, in the order of their keys."""

    def __init__(self, path: Path) -> None:
        """Reads what earlier runs found."""
        self._path = path
        lines = path.read_text().splitlines() if path.is_file() else []
        self.found = {one.mutant: one for one in (Result(**json.loads(line)) for line in lines)}

    def add(self, mutant: Mutant, commit: str, killed_by: str) -> None:
        """Keeps one result, on the disk too."""
        before = self.found.get(mutant.key)
        lived = before.lived if before else not killed_by
        self.found[mutant.key] = Result(mutant.key, commit, killed_by, lived)
        rows = [json.dumps(asdict(one)) for _, one in sorted(self.found.items())]
        self._path.write_text("".join(f"{row}\n" for row in rows))


def ordered(room: str, seed: int) -> list[Mutant]:
    """A room's mutants in an order that chance decides, and that code which moves does not change."""
    found = [mutant for module in modules_of([room]) for mutant in mutants_of(module)]
    return sorted(found, key=lambda mutant: blake2b(f"{seed} {mutant.key}".encode(), digest_size=8).digest())


def room_tests(room: str) -> list[Path]:
    """The test files of a room."""
    return sorted((TESTS / room).glob("test_*.py"))


def killer(mutant: Mutant, source: str, runner: Runner, coverage: Coverage, *, again: bool) -> str:
    """The test that kills a mutant, "timed out", or "" when it lives."""
    tried: set[str] = set()
    text = (SOURCE / mutant.module).read_text()
    others = tests_of(mutant.module) if again else ()
    room = room_tests(mutant.module.split("/")[0])
    for files, at_most_s in (((), QUICK_S), (others, AGAIN_S if again else AT_MOST_S)):
        coverage.measure(files)
        tests, total_s, longest_s = [], 0.0, 0.0
        running = coverage.tests(mutant.module, text, mutant.line) or (
            coverage.whole(tests_of(mutant.module)) or coverage.whole(room)
        )
        for test, seconds in running.items():
            if test not in tried and (total_s + seconds <= at_most_s or not tests):
                tests.append(test)
                total_s, longest_s = total_s + seconds, max(longest_s, seconds)
        tried |= set(tests)
        with runner.planted(mutant.module, source):
            if tests and (found := runner.failure(tests, 60 + 15 * total_s, 30 + 15 * longest_s)):
                return found.removeprefix("FAILED ")
    return ""


def hunt(arguments: argparse.Namespace) -> dict[str, object]:
    """Tries mutants until each room has its number of results; returns the figures of all."""
    results, known = Results(arguments.results), equivalents()
    rooms: dict[str, list[Mutant]] = {}
    deadline = time.monotonic() + 60 * arguments.minutes
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    with tempfile.TemporaryDirectory() as folder, Runner(SOURCE, Path(folder), SAMPLE) as runner:
        coverage = Coverage(runner.coverage, ROOT)
        for room in arguments.rooms or SAMPLE:
            rooms[room] = ordered(room, arguments.seed)
            for mutant, source in _to_try(rooms[room], results, known, arguments.again, SAMPLE[room]):
                coverage.measure(room_tests(room))
                if time.monotonic() > deadline:
                    break
                began = time.monotonic()
                results.add(mutant, commit, killer(mutant, source, runner, coverage, again=arguments.again))
                verdict = results.found[mutant.key].killed_by or "SURVIVES"
                print(f"{time.monotonic() - began:.1f}", mutant.key, verdict, sep="\t", file=sys.stderr, flush=True)
    return figures_of(rooms, results, known)


def _to_try(
    mutants: list[Mutant], results: Results, known: dict[str, str], again: bool, quota: int
) -> Iterator[tuple[Mutant, str]]:
    """What is left of a room's sample, with the changed source; or once more what has lived."""
    if again:
        lives = [mutant for mutant in mutants if mutant.key not in known and mutant.key in results.found]
        yield from ((one, one.source()) for one in lives if not results.found[one.key].killed_by)
        return
    count = sum(mutant.key in results.found for mutant in mutants)
    for mutant in mutants:
        if count >= quota:
            return
        if mutant.key not in results.found and (source := mutant.source()):
            count += 1
            yield mutant, source


def figures_of(rooms: dict[str, list[Mutant]], results: Results, known: dict[str, str]) -> dict[str, object]:
    """Prints who lives; returns the figures of each room and of all, over the mutants that are still in the code."""
    total: Counter[str] = Counter()
    by_room = {}
    for room, mutants in rooms.items():
        tried = [(mutant, results.found[mutant.key]) for mutant in mutants if mutant.key in results.found]
        fates = {
            mutant: "equivalent"
            if mutant.key in known
            else {"": "survived", TIMED_OUT: "timeouts"}.get(result.killed_by, "killed")
            for mutant, result in tried
        }
        for mutant, fate in sorted(fates.items(), key=lambda item: (item[0].module, item[0].line)):
            if fate == "survived":
                print(f"src/shoal/{mutant.module}:{mutant.line}: {mutant.key}")
        counts = Counter(fates.values())
        counts["sampled"] = len(tried)
        counts["lived_at_first"] = sum(result.lived and mutant.key not in known for mutant, result in tried)
        by_room[room] = dict(sorted(counts.items()))
        total += counts
    names = ("sampled", "killed", "survived", "equivalent", "timeouts", "lived_at_first")
    share = round(total["survived"] / max(1, total["sampled"]), 4)
    return {"rooms": by_room, **{name: total[name] for name in names}, "share": share}


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
    parser.add_argument("rooms", nargs="*", choices=[*SAMPLE, []], help="rooms of src/shoal; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no other mutant after so many minutes")
    parser.add_argument("--again", action="store_true", help="try once more what has lived")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--planted", action="store_true", help="only the mutants of tools/mutants_planted.toml")
    arguments = parser.parse_args()
    figures = planted() if arguments.planted else hunt(arguments)
    print(json.dumps(figures))
    return 1 if figures.get("survived") or figures.get("survivors") or figures.get("wrong") else 0


if __name__ == "__main__":
    raise SystemExit(main())
