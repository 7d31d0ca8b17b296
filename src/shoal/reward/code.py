"""Programs scored by unit tests: the jobs that run a program, and the verdict of their output on each test. Pure.

Expected values stay out of the program's sandbox: the program can print anything, and must print the right values.
"""

import json
import marshal
import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from shoal import checker
from shoal.checker import UnitTest
from shoal.errors import TaskError
from shoal.reward.questions import file_names, snippet
from shoal.sandbox.program import Ended, Finished
from shoal.types import Reward, RewardStatus

OUTPUT_BYTES = 1 << 16
"""Bytes that a program may print beyond twice the expected output."""
PYTEST_START_S = 10.0
PYTEST_MEMORY_BYTES = 512 << 20
WALL = 3.0
"""Wall seconds allowed per second of processor time, plus `WALL_START_S`: other processes use the processors too."""
WALL_START_S = 2.0
_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_LATE_SIGNALS = (signal.SIGALRM, signal.SIGPROF, signal.SIGXCPU)


@dataclass(frozen=True, slots=True)
class Job:
    """Tests of one kind, with all that a sandbox needs to run them on a program."""

    kind: str
    """`stdin`: a script, run once per input. `call`: functions that are called. `judge`: another sandbox has the tests.
    """
    tests: tuple[UnitTest, ...]
    given: tuple[bytes, ...]
    """Inputs of a script; for the other kinds one packed request."""
    cpu_s: float
    """Seconds of processor time of one test."""
    memory_bytes: int
    count: int = 1
    """Number of tests; of a pytest file as many as its text defines."""
    needs_pytest: bool = False
    limit: int = OUTPUT_BYTES
    """Bytes of output, of a script for one input."""

    @property
    def total_s(self) -> float:
        """Seconds of processor time of all tests together."""
        return self.cpu_s * self.count + (PYTEST_START_S if self.needs_pytest else 0.0)


@dataclass(frozen=True, slots=True)
class Runs:
    """The result of a job."""

    program: tuple[Finished, ...]
    """The end of each sandbox of the program: one, or one per input if `apart`."""
    judge: Finished | None = None
    """The end of the sandbox with the tests of a `judge` job."""
    apart: bool = False
    """True if each input of a script had its own sandbox, whose output is the script's output."""


def wall_s(cpu_s: float) -> float:
    """Wall seconds allowed to a program that may use `cpu_s` of processor time."""
    return WALL_START_S + WALL * cpu_s


def is_late(finished: Finished) -> bool:
    """True if a program ran out of time."""
    out_of_time = (Ended.KILLED_WALL, Ended.KILLED_CPU, Ended.KILLED_IDLE)
    return finished.ended in out_of_time or (finished.ended is Ended.SIGNALLED and finished.signal in _LATE_SIGNALS)


def is_repeatable(finished: Finished) -> bool:
    """True if the end does not depend on the machine's load: false when only the wall clock ran out."""
    by_clock = finished.ended is Ended.SIGNALLED and finished.signal == signal.SIGALRM
    return finished.ended is not Ended.KILLED_WALL and not by_clock


def why_not(finished: Finished) -> str:
    """The reason for a program's bad end; empty for a good end."""
    if is_late(finished):
        return "timed out"
    if finished.ended is Ended.EXITED:
        said = finished.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return (said[0] if said else f"exit code {finished.exit_code}") if finished.exit_code else ""
    if finished.ended is Ended.SIGNALLED:
        return f"ended by signal {finished.signal}"
    return "printed too much" if finished.ended is Ended.KILLED_OUTPUT else finished.ended.value.replace("_", " ")


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """The verdict on one test; `why` is empty when the test passed."""

    why: str = ""
    name: str = ""
    is_repeatable: bool = True


def code_of(answer: str) -> str:
    """The program of an answer: its last fenced block, else the whole answer.

    >>> code_of("Sure:\\n```python\\nx = 1\\n```\\nDone."), code_of("x = 1")
    ('x = 1\\n', 'x = 1')
    """
    blocks: list[str] = _FENCE.findall(answer)
    return blocks[-1] if blocks else answer


def tests_in(info: str) -> list[UnitTest]:
    """The unit tests of a task. Raises `TaskError`."""
    return checker.unit_tests(json.loads(info).get("tests", []), "info.tests")


def jobs_of(spec: checker.Code, tests: Sequence[UnitTest]) -> list[Job]:
    """The jobs that decide whether a program passes the tests. Raises `TaskError` for tests that cannot be judged."""
    printed = tuple(test for test in tests if test.stdout is not None)
    called = tuple(test for test in tests if test.call is not None)
    stated = tuple(test for test in tests if test.code is not None)
    limits = (spec.timeout_s, wall_s(spec.timeout_s), 0)
    job = partial(Job, cpu_s=spec.timeout_s, memory_bytes=spec.memory_mb << 20)
    jobs: list[Job] = []
    if printed:
        inputs = tuple((test.stdin or "").encode() for test in printed)
        limit = OUTPUT_BYTES + 2 * max(len(test.stdout or "") for test in printed)
        jobs.append(job("stdin", printed, inputs, count=len(printed), limit=limit))
    if called:
        calls = b"".join(marshal.dumps((test.call, test.args, test.kwargs)) for test in called)
        limit = OUTPUT_BYTES + 4 * sum(len(msgspec.json.encode(test.returns)) for test in called)
        jobs.append(job("call", called, (marshal.dumps(limits) + calls,), count=len(called), limit=limit))
    if stated:
        given = marshal.dumps({"limits": limits, "snippets": [snippet(test.code or "") for test in stated]})
        jobs.append(job("judge", stated, (given,), count=len(stated)))
    for test in tests:
        if test.pytest is not None:
            names, count = file_names(test.pytest)
            given = marshal.dumps({"limits": limits, "file": test.pytest, "names": names})
            jobs.append(job("judge", (test,), (given,), count=count, needs_pytest=True))
    return jobs


def verdicts(job: Job, runs: Runs, tolerance: float) -> list[CaseVerdict]:
    """One verdict for each test that the job decides; for a pytest file, one for each test that pytest ran.

    Raises `TaskError` when the tests cannot be judged.
    """
    if job.kind == "judge":
        return _verdicts_of_judge(job, runs)
    if job.kind == "stdin":
        printed = zip(job.tests, _scripts(job, runs), strict=False)
        found = [_compared(test, one) if isinstance(one, str) else one for test, one in printed]
    else:
        lines = zip(job.tests, _lines(runs.program[0]), strict=False)
        found = [_returned(test, line, tolerance) for test, line in lines]
    left = _missing(runs.program[-1])
    if job.kind == "stdin" and found and found[-1].why:
        left = CaseVerdict("not run: an earlier test failed")
    return found + [left] * (job.count - len(found))


def _verdicts_of_judge(job: Job, runs: Runs) -> list[CaseVerdict]:
    """Verdicts of the tests' sandbox, which the program cannot reach."""
    assert runs.judge is not None
    lines = _lines(runs.judge)
    found = [CaseVerdict(str(line["why"]), str(line["name"])) for line in lines if "name" in line]
    last = lines[-1] if lines else {}
    if "refused" in last:
        raise TaskError(f"these tests cannot be judged: {last['refused']}")
    if "end" not in last:
        if runs.judge.ended in (Ended.EXITED, Ended.SIGNALLED) and not is_late(runs.judge):
            raise TaskError(f"the tests' process ended by itself: {why_not(runs.judge) or 'without a word'}")
        return [*found, *[_missing(runs.judge)] * max(job.count - len(found), 1)]
    late = next(filter(is_late, runs.program), None)
    if late is None or is_repeatable(late):
        return found
    return [replace(verdict, is_repeatable=not verdict.why) for verdict in found]


def _missing(run: Finished) -> CaseVerdict:
    """The verdict on a test without a result."""
    return CaseVerdict(why_not(run) or "the program ended before this test", is_repeatable=is_repeatable(run))


def reward(found: Sequence[CaseVerdict], *, partial: bool) -> Reward:
    """The reward of the verdicts on all tests.

    >>> reward([CaseVerdict(), CaseVerdict("expected 2, got 3")], partial=True).value
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
    value = share if partial else float(passed == len(found))
    is_repeatable = all(verdict.is_repeatable for verdict in found)
    return Reward(value, RewardStatus.SCORED, parts, evidence, is_repeatable)


def _scripts(job: Job, runs: Runs) -> list[str | CaseVerdict]:
    """The script's output for each input, or the reason for its bad end."""
    if runs.apart:
        return [_ended(run) or run.stdout.decode(errors="replace") for run in runs.program]
    (run,) = runs.program
    found: list[str | CaseVerdict] = []
    for line in _lines(run)[: len(job.given)]:
        status, text = line.get("status"), line.get("o")
        if not isinstance(status, int) or not isinstance(text, str):  # the program may have written the line
            return [*found, CaseVerdict("the result is not an output")]
        ended = Ended.KILLED_OUTPUT if line.get("much") else Ended.SIGNALLED if status < 0 else Ended.EXITED
        alone = replace(run, ended=ended, exit_code=status, signal=-status)
        found.append(_ended(alone) or text)
    return found


def _ended(run: Finished) -> CaseVerdict | None:
    """The verdict on a script that ended badly; None after a good end."""
    why = why_not(run)
    return CaseVerdict(why, is_repeatable=is_repeatable(run)) if why else None


def _compared(test: UnitTest, printed: str) -> CaseVerdict:
    given, expected = _trimmed(printed), _trimmed(test.stdout or "")
    return (
        CaseVerdict() if given == expected else CaseVerdict(f"expected {_short(test.stdout)}, printed {_short(given)}")
    )


def _trimmed(text: str) -> list[str]:
    """Lines without trailing space, and without empty lines at the end, as judges compare them."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().splitlines()


def _returned(test: UnitTest, line: dict[str, object], tolerance: float) -> CaseVerdict:
    if "v" not in line:
        return CaseVerdict(str(line.get("e") or "no value came")[:300])
    try:  # the program may have written the line
        if equal(line["v"], test.returns, tolerance):
            return CaseVerdict()
        return CaseVerdict(f"expected {_short(test.returns)}, got {_short(line['v'])}")
    except (ValueError, TypeError, OverflowError, RecursionError):
        return CaseVerdict("the result is not a plain value")


def equal(value: object, expected: object, tolerance: float) -> bool:
    """True if a value as written by `in_sandbox.solution` equals a test's JSON. A tuple counts as a list.

    A value in any other form raises Python's own error: see `_returned`.

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


def _lines(run: Finished) -> list[dict[str, object]]:
    """Whole lines of a run that are JSON objects with one meaning, up to the first wrong line."""
    found: list[dict[str, object]] = []
    for line in run.stdout.split(b"\n")[:-1]:
        try:
            found.append(msgspec.json.decode(line, type=dict[str, object]))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            break
    return found


def _short(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return repr(text[:80]) if isinstance(value, str) else text[:80]
