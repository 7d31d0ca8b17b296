"""Programs scored by unit tests: what is run of a program, and what its output says about each test. Pure.

Expected values stay here; a program can print what it likes and has to print what is right.
"""

import ast
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from shoal import checker
from shoal.checker import UnitTest
from shoal.reward.in_sandbox.driver import EXITED, SIGNALLED, TIMED_OUT
from shoal.types import Reward, RewardStatus

OUTPUT_BYTES = 1 << 16
"""That a program may print beyond twice what is expected."""
PYTEST_START_S = 10.0
_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Job:
    """A program, and what it is run with: one run per input, in order."""

    kind: str
    """`stdin`, `call`, `code` or `pytest`."""
    program: bytes
    inputs: tuple[bytes, ...]
    timeout_s: float
    memory_bytes: int
    parts: int = 1
    """Lines that one run gives; each has `timeout_s`."""
    extra_s: float = 0.0
    limit: int = OUTPUT_BYTES
    """Bytes of output."""
    stop: bool = False
    """Whether inputs after one that the program fails at are left out."""
    needs_packages: bool = False

    @property
    def longest_s(self) -> float:
        """Of all its runs together."""
        return len(self.inputs) * (self.timeout_s * self.parts + self.extra_s)


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one input."""

    status: int
    """As in `inside.driver`."""
    code: int
    """The exit code, or minus the signal."""
    out: bytes
    err: bytes

    @property
    def why(self) -> str:
        """Why it did not end well; empty when it did."""
        said = self.err.decode(errors="replace").strip().splitlines()[-1:]
        if self.status == EXITED:
            return (said[0] if said else f"exit code {self.code}") if self.code else ""
        if self.status == TIMED_OUT:
            return "timed out"
        return f"ended by signal {-self.code}" if self.status == SIGNALLED else "printed too much"


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one test; `why` is empty when it passed."""

    why: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """The jobs that one program's tests need. `tests[i]` are those that `jobs[i]` decides."""

    jobs: tuple[Job, ...]
    tests: tuple[tuple[UnitTest, ...], ...]


def code_of(answer: str) -> str:
    """The program of an answer: its last fenced block, else all of it.

    >>> code_of("Sure:\\n```python\\nx = 1\\n```\\nDone."), code_of("x = 1")
    ('x = 1\\n', 'x = 1')
    """
    blocks: list[str] = _FENCE.findall(answer)
    return blocks[-1] if blocks else answer


@lru_cache(maxsize=512)
def tests_in(info: str) -> tuple[UnitTest, ...]:
    """The unit tests of a task. Raises `TaskError`."""
    return tuple(checker.unit_tests(json.loads(info).get("tests", []), "info.tests"))


def examination(spec: checker.Code, tests: Sequence[UnitTest], answer: str) -> Examination:
    """What to run to find out whether the answer's program passes the tests."""
    program = spec.template.replace("{answer}", code_of(answer)).encode(errors="replace")
    kinds: dict[str, list[UnitTest]] = {}
    for test in tests:
        kinds.setdefault(_kind(test), []).append(test)
    jobs: list[Job] = []
    decided: list[tuple[UnitTest, ...]] = []
    for kind, group in kinds.items():
        for own in [[test] for test in group] if kind == "pytest" else [group]:
            jobs.append(_job(spec, kind, program, own))
            decided.append(tuple(own))
    return Examination(tuple(jobs), tuple(decided))


def _kind(test: UnitTest) -> str:
    return (
        "stdin"
        if test.stdout is not None
        else next(k for k in ("call", "code", "pytest") if getattr(test, k) is not None)
    )


def _job(spec: checker.Code, kind: str, program: bytes, tests: Sequence[UnitTest]) -> Job:
    job = Job(kind, program, (), spec.timeout_s, spec.memory_mb << 20)
    match kind:
        case "stdin":
            inputs = tuple((test.stdin or "").encode() for test in tests)
            expected = max(len(test.stdout or "") for test in tests)
            return replace(job, inputs=inputs, limit=OUTPUT_BYTES + 2 * expected, stop=not spec.partial)
        case "call":
            cases = [{"call": test.call, "args": test.args, "kwargs": test.kwargs} for test in tests]
            expected = sum(len(msgspec.json.encode(test.returns)) for test in tests)
            return replace(
                job, inputs=(msgspec.json.encode(cases),), parts=len(tests), limit=OUTPUT_BYTES + 4 * expected
            )
        case "code":
            texts = [test.code for test in tests]
            return replace(job, inputs=(msgspec.json.encode(texts),), parts=len(tests))
    text = tests[0].pytest or ""
    needed, count = _pytest_needs(text)
    tree = {"text": text, "needs_pytest": needed}
    extra_s = PYTEST_START_S if needed else 0.0
    memory = max(job.memory_bytes, 512 << 20) if needed else job.memory_bytes
    return replace(
        job,
        inputs=(msgspec.json.encode(tree),),
        parts=max(count, 1),
        extra_s=extra_s,
        needs_packages=needed,
        memory_bytes=memory,
    )


def _pytest_needs(text: str) -> tuple[bool, int]:
    """Whether a test file needs pytest itself, and how many tests it has."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return True, 1
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    has_fixtures = any(argument.arg != "self" for function in functions for argument in function.args.args)
    return has_fixtures or "pytest" in text, len(functions)


def verdicts(job: Job, tests: Sequence[UnitTest], runs: Sequence[Run], tolerance: float) -> list[Verdict]:
    """One for each test that the job decides; of a pytest file, one for each of its test functions."""
    match job.kind:
        case "stdin":
            ended = [_printed(test, run) for test, run in zip(tests, runs, strict=False)]
            return ended + [Verdict("not run: an earlier test failed")] * (len(tests) - len(ended))
        case "call":
            lines = _lines(runs)
            said = [_returned(test, line, tolerance) for test, line in zip(tests, lines, strict=False)]
            return said + [Verdict(_why(runs))] * (len(tests) - len(said))
    told = _lines(runs)
    found = [Verdict(str(line.get("why", "?")), str(line.get("name", ""))) for line in told if "end" not in line]
    is_whole = len(found) < len(told) and bool(found)
    return found if is_whole else [*found, *[Verdict(_why(runs))] * max(job.parts - len(found), 1)]


def reward(found: Sequence[Verdict], *, partial: bool) -> Reward:
    """What the verdicts on all tests come to.

    >>> reward([Verdict(), Verdict("expected 2, got 3")], partial=True).value
    0.5
    """
    passed = sum(not verdict.why for verdict in found)
    share = passed / len(found)
    failed = next(((i, verdict) for i, verdict in enumerate(found, 1) if verdict.why), None)
    evidence = ""
    if failed is not None:
        label = failed[1].name or f"test {failed[0]}"
        evidence = f"{label} of {len(found)}: {failed[1].why}"[:500]
    parts = (("tests_passed", float(passed)), ("tests", float(len(found))))
    return Reward(share if partial else float(passed == len(found)), RewardStatus.SCORED, parts, evidence)


def _printed(test: UnitTest, run: Run) -> Verdict:
    if run.why:
        return Verdict(run.why)
    given, expected = (_trimmed(text) for text in (run.out.decode(errors="replace"), test.stdout or ""))
    return Verdict() if given == expected else Verdict(f"expected {_short(test.stdout)}, printed {_short(given)}")


def _trimmed(text: str) -> list[str]:
    """Lines without trailing space, and without empty ones at the end, as judges compare."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().splitlines()


def _returned(test: UnitTest, line: dict[str, object], tolerance: float) -> Verdict:
    if "v" not in line:
        return Verdict(str(line.get("e", "?"))[:300])
    try:  # the line may be of the program's own making
        if equal(line["v"], test.returns, tolerance):
            return Verdict()
        return Verdict(f"expected {_short(test.returns)}, got {_short(line['v'])}")
    except (ValueError, TypeError, OverflowError, RecursionError):
        return Verdict("what came is no value")


def equal(value: object, expected: object, tolerance: float) -> bool:
    """Whether a value as `inside.values` wrote it is the one that a test's JSON says. A tuple counts as a list.

    Of what nothing wrote that way, it raises what Python does: see `_returned`.

    >>> equal({"t": [1, {"d": [["a", 0.30000000000000004]]}]}, [1, {"a": 0.3}], 1e-9)
    True
    >>> equal(True, 1, 0), equal({"s": [1]}, [1], 0)
    (False, False)
    """
    if isinstance(value, dict):
        ((tag, inner),) = value.items()
        if tag == "t":
            return equal(inner, expected, tolerance)
        if tag == "i":
            return isinstance(expected, int) and int(str(inner), 16) == expected
        if tag == "d" and isinstance(expected, dict) and isinstance(inner, list) and len(inner) == len(expected):
            table = {str(key): item for key, item in inner if isinstance(key, str | int)}
            return table.keys() == expected.keys() and all(equal(table[k], expected[k], tolerance) for k in table)
        return False
    if isinstance(value, list):
        return (
            isinstance(expected, list)
            and len(value) == len(expected)
            and all(equal(a, b, tolerance) for a, b in zip(value, expected, strict=True))
        )
    if isinstance(value, bool) != isinstance(expected, bool):
        return False
    if isinstance(value, int | float) and isinstance(expected, int | float):
        is_exact = isinstance(value, int) and isinstance(expected, int)
        return value == expected or (not is_exact and math.isclose(value, expected, rel_tol=tolerance))
    return type(value) is type(expected) and value == expected


def _lines(runs: Sequence[Run]) -> list[dict[str, object]]:
    """The whole lines of a run that are JSON objects with one meaning; what follows a wrong one counts for nothing."""
    found: list[dict[str, object]] = []
    for line in (runs[0].out if runs else b"").split(b"\n")[:-1]:
        try:
            found.append(msgspec.json.decode(line, type=dict[str, object]))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            break
    return found


def _why(runs: Sequence[Run]) -> str:
    """Why a run gave no verdict on a test."""
    return (runs[0].why if runs else "") or "the program ended before this test"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return repr(text[:80]) if isinstance(value, str) else text[:80]
