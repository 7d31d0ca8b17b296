"""Programs scored by unit tests; those that cheat are in `tests/sandbox/test_sandbox_hostile.py`."""

import asyncio
import json
import tracemalloc
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import TypeVar

import pytest

from shoal.checker import Code, task_spec
from shoal.reward import code
from shoal.reward.code import Job, Runs, code_of, equal, jobs_of, reward, verdicts
from shoal.reward.code_runner import CodeScorer
from shoal.sandbox.program import Backend, Ended, Finished
from shoal.sandbox.runner import why_not
from shoal.types import Json, Reward, RewardStatus, Task

T = TypeVar("T")
ADD = "def add(a, b):\n    return a + b\n"
CALLS: list[Json] = [{"call": "add", "args": [1, 2], "returns": 3}, {"call": "add", "args": [2, 2], "returns": 4}]
ASSERTIONS: list[Json] = [{"code": "assert add(1, 2) == 3"}, {"code": "import math\nassert math.isclose(add(2, 2), 4)"}]
FILE: list[Json] = [
    {
        "pytest": """
from solution import add
def test_a():
    assert add(1, 2) == 3
def test_b():
    assert add(2, 2) == 4
"""
    }
]
KINDS = {"call": CALLS, "code": ASSERTIONS, "pytest": FILE}
LINES: list[Json] = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "4 5\n", "stdout": "9"}]
READS = "a, b = map(int, input().split())\nprint(a + b)"


def scored(
    tests: list[Json], answers: list[str], spec: Code | None = None, backend: Backend | None = None
) -> list[Reward]:
    """By a scorer of one sandbox at a time."""

    async def work(scorer: CodeScorer) -> list[Reward]:
        task = Task("t", "t", (), None, json.dumps({"tests": tests}))
        return await scorer.score_by(spec or Code(timeout_s=2.0), task, answers)

    return with_scorer(work, backend)


def with_scorer(work: Callable[[CodeScorer], Coroutine[None, None, T]], backend: Backend | None = None) -> T:
    async def main() -> T:
        async with aclosing(CodeScorer(1, backend)) as scorer:
            return await work(scorer)

    return asyncio.run(main())


def values(rewards: list[Reward]) -> list[float]:
    assert all(reward.status is RewardStatus.SCORED for reward in rewards), rewards
    return [reward.value for reward in rewards]


@pytest.fixture(params=list(Backend), ids=lambda backend: str(backend.value))
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every rung that this machine has."""
    chosen: Backend = request.param
    if why_not(chosen):
        pytest.skip(f"{chosen.value}: {why_not(chosen)}")
    return chosen


def test_what_a_program_prints_is_compared_line_by_line(backend: Backend) -> None:
    answers = [
        READS,
        f"```python\n{READS}\n```",
        "print(3)",
        "print('3 ')\nprint()",
        "raise SystemExit('bad')",
        "while 1: print(1)",
    ]
    rewards = scored(LINES, answers, backend=backend)
    assert values(rewards) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert rewards[2].evidence.startswith("test 2 of 2: expected '9'")
    assert rewards[4].evidence == "test 1 of 2: bad"
    assert rewards[5].evidence == "test 1 of 2: printed too much"


SUM = "a, b = map(int, input().split())\n"


@pytest.mark.parametrize(
    "program",
    [
        "print(a + b)\nexit()",
        "print(a + b)\nif a:\n    quit(0)",
        "import atexit, sys\natexit.register(lambda: print(a + b))\nsys.exit()",
        "import atexit, io, sys\nsys.stdout = io.StringIO()\nprint(a + b)\n"
        "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))",
        "import sys\nsys.stdout.write(str(a + b))\nsys.stdout.close()",
        "out = open(1, 'w')\nout.write(str(a + b))",
        "import io, os\nclass Fast(io.IOBase):\n    def flush(self): os.write(1, str(a + b).encode())\n"
        "import sys\nsys.stdout = Fast()",
        "import sys, threading\nthreading.Thread(target=lambda: print(a + b)).start()\nsys.exit()",
    ],
)
@pytest.mark.parametrize("tests", [LINES, LINES[:1]], ids=["forked", "alone"])
def test_a_program_ends_and_prints_as_under_python(program: str, tests: list[Json]) -> None:
    assert values(scored(tests, [SUM + program, f"{SUM}print(a + b)\nexit(1)"])) == [1.0, 0.0]


def test_starter_code_may_name_types_that_it_does_not_import() -> None:
    calls: list[Json] = [{"call": "Solution.total", "args": [[1, 2]], "returns": 3}]
    answer = "class Solution:\n    def total(self, numbers: List[int]) -> int:\n        return sum(numbers)\n"
    assert values(scored(calls, [answer])) == [1.0]


def test_partial_credit_is_the_share_of_tests_passed() -> None:
    three = "print(3)"
    assert values(scored(LINES, [three, READS], Code(partial=True))) == [0.5, 1.0]
    assert scored(LINES, [three], Code(partial=True))[0].parts == (("tests_passed", 1.0), ("tests", 2.0))
    only_small = "def add(a, b):\n    return 3"
    for tests in KINDS.values():
        assert values(scored(tests, [only_small, ADD], Code(partial=True))) == [0.5, 1.0]


def test_tests_see_values_errors_arguments_changed_in_place_and_printed_text() -> None:
    program = """
class TooMany(ValueError): pass
LIMIT = 2
def double(items):
    for i in range(len(items)): items[i] *= 2
def hello(): print("hi")
def divide(a, b): return a / b
def push(items, item):
    if len(items) == LIMIT: raise TooMany("full")
    return [*items, item]
def pairs(n): return {(i, str(i)) for i in range(n)}
def squares(n): return (i * i for i in range(n))
"""
    tests: list[Json] = [
        {
            "pytest": """
import unittest
import pytest
import solution
from solution import divide, double, hello, pairs, push, squares

@pytest.fixture
def items():
    return [1]

def test_errors(items):
    items = push(items, [2])
    assert len(items) == solution.LIMIT
    with pytest.raises(ValueError, match="full"):
        push(items, 3)

@pytest.mark.parametrize("n", [0, 3])
def test_pairs(n):
    assert pairs(n) == {(i, str(i)) for i in range(n)}

def test_changed_in_place():
    items = [1, 2]
    double(items)
    assert items == [2, 4]

def test_printed(capsys):
    hello()
    assert capsys.readouterr().out == "hi\\n"

def test_iterators():
    assert list(squares(3)) == [0, 1, 4]

@pytest.mark.xfail
def test_wrong(): assert divide(4, 2) == 3

class Division(unittest.TestCase):
    def setUp(self): self.zero = 0
    def test_zero(self):
        with self.assertRaises(ZeroDivisionError): divide(1, self.zero)

class TestSetUp:
    def setup_method(self): self.two = 2
    def test_half(self): assert divide(3, self.two) == 1.5
"""
        }
    ]
    (reward,) = scored(tests, [program], Code(timeout_s=10.0))
    assert (reward.value, reward.evidence, reward.parts[1]) == (1.0, "", ("tests", 8.0))


CANNOT = {
    "async": ("async def test_a(): assert f(1) == 1", "coroutine"),
    "generator": ("def test_a(): yield f(1)", "generator"),
    "class": ("def test_a(): assert solution.Stack().pop() == 1", "Stack looks like a class"),
    "no program": ("def test_a(): assert True", "imports from solution"),
    "fixture": ("def test_a(nowhere): assert f(1) == 1", "nowhere"),
    "function": ("def test_a(): assert f(lambda: 1) == 1", "other than a plain value"),
    "module": ("import no_such_module\ndef test_a(): assert f(1) == 1", "no_such_module"),
    "skipped": ("import pytest\n@pytest.mark.skip\ndef test_a(): assert f(1) == 1", "no test"),
    "syntax": ("def test_a(: pass", "expected Python"),
}


@pytest.mark.parametrize("kind", CANNOT)
def test_tests_that_cannot_be_judged_are_refused_with_a_sentence(kind: str) -> None:
    text, words = CANNOT[kind]
    head = "" if kind == "no program" else "import solution\nfrom solution import *\n"
    (reward,) = scored([{"pytest": head + text}], ["def f(x): return x"])
    assert (reward.status, words in reward.evidence) == (RewardStatus.FAILED, True), reward


DODGES = {
    "an iterator handed back": ("def test_a(): assert f(f(1)) == 1", "def f(x): yield x"),
    "a value that breaks the collecting": ("X = f(1) + 1\ndef test_a(): assert f(1) == 1", "def f(x): return 'a'"),
    "nothing there": ("def test_a(): assert f(1) == 1", "def g(x): return 1"),
    "raises at import": ("def test_a(): assert f(1) == 1", "1 / 0"),
    "leaves at import": ("def test_a(): assert f(1) == 1", "import os; os._exit(0)"),
    "an object": ("def test_a(): assert f(1) == 1", "def f(x): return object()"),
    "a deep value": (
        "def test_a(): assert f(1) == 1",
        "def f(x):\n    y = []\n    for _ in range(400): y = [y]\n    return y",
    ),
    "a large value": ("def test_a(): assert f(1) == 1", "def f(x): return [1] * 10 ** 6"),
    "raises what skips": (
        "def test_a(): assert f(1) == 1",
        "class Skipped(BaseException): pass\ndef f(x): raise Skipped",
    ),
}


@pytest.mark.parametrize("dodge", DODGES)
def test_no_program_makes_its_tests_unjudgeable(dodge: str) -> None:
    text, program = DODGES[dodge]
    assert values(scored([{"pytest": f"from solution import f\n{text}"}], [program])) == [0.0]


def test_a_module_that_a_test_forgot_to_import_is_python_s_own() -> None:
    tests: list[Json] = [{"code": "assert math.isclose(f(1), 2.0)"}]
    wrong = "class math: isclose = lambda *_: True\ndef f(x): return 3"
    assert values(scored(tests, ["def f(x): return 2 * x", wrong])) == [1.0, 0.0]


SHADOWS = ("set", "abs", "sorted", "len", "str", "round", "range", "all", "isinstance", "math", "approx")


def test_no_name_of_a_program_replaces_what_a_test_means_by_it() -> None:
    """The tests use builtins and imports; the program defines functions of the same names that say yes."""
    uses = "abs(f(1)) == 2 and sorted(f(1)) and len(f(1)) == 2 and str(f(1)) == 'x' and round(f(1)) == 9 and all(f(1))"
    tests: list[Json] = [{"code": "import math\nassert set(f(1)) == set((1, 2))"}, {"code": f"assert {uses}"}]
    file: list[Json] = [
        {"pytest": "from pytest import approx\nfrom solution import *\ndef test_a(): assert set(f(1)) == set((1, 2))"},
        {"pytest": "from pytest import approx\nfrom solution import *\ndef test_a(): assert f(1) == approx(2)"},
    ]
    yes = "".join(f"def {name}(*_): return ()\n" for name in SHADOWS)
    programs = [f"{yes}def f(x): return ()", f"{yes}def f(x): return '2'"]
    assert values(scored(tests, programs) + scored(file, programs)) == [0.0] * 4


def test_nothing_of_one_program_is_left_for_the_next(backend: Backend) -> None:
    leaves = """
import os, threading, time
os.makedirs("deep/er"); open("deep/er/json.py", "w").write("x"); open("left", "w").write("x")
try: os.chmod("deep", 0)
except PermissionError: pass
def add(a, b):
    try:
        if os.fork() == 0:
            os.setsid()
            while True:
                open("left", "w").write("x"); time.sleep(0.001)
    except (OSError, PermissionError): pass
    return a + b
"""
    looks = (
        "import os\nname = 'left' in os.listdir('.') or os.path.exists('deep')\ndef add(a, b): return a + b + name\n"
    )
    rewards = scored(CALLS, [leaves, looks, leaves, looks], backend=backend)
    assert values(rewards) == [1.0] * 4, rewards


def test_two_that_hang_do_not_change_the_verdict_of_a_dozen_honest_ones() -> None:
    hangs = "def add(a, b):\n    while True: pass\n"
    honest = [f"{ADD}# {number}" for number in range(12)]

    async def work(scorer: CodeScorer) -> list[Reward]:
        task = Task("t", "t", (), None, json.dumps({"tests": CALLS}))
        groups = [[hangs, *honest[:6]], [hangs, *honest[6:]]]
        both = await asyncio.gather(*(scorer.score_by(Code(timeout_s=0.5), task, group) for group in groups))
        return [reward for rewards in both for reward in rewards]

    assert values(with_scorer(work)) == [0.0, *[1.0] * 6] * 2


def test_a_template_takes_the_answer_in() -> None:
    spec = Code(template="def add(a, b):\n    return a {answer} b\n")
    assert values(scored(CALLS, ["+", "-", "+ 0 +", "* b +"], spec)) == [1.0, 0.0, 1.0, 0.0]


def test_methods_of_a_class_are_called_on_a_fresh_object() -> None:
    tests: list[Json] = [{"call": "Solution.count", "args": [], "returns": 1}] * 2
    program = "class Solution:\n    n = 0\n    def count(self):\n        self.n += 1\n        return self.n\n"
    assert values(scored(tests, [program])) == [1.0]


@pytest.mark.parametrize(
    ("value", "expected", "is_equal"),
    [
        ({"t": [1, 2]}, [1, 2], True),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (10**15 + 1, 10**15, False),
        ({"i": hex(10**30)}, 10**30, True),
        (True, 1, False),
        (None, None, True),
        ("1", 1, False),
        ({"d": [["a", 1]]}, {"a": 1}, True),
        ({"d": [[1, 2]]}, {"1": 2}, True),
        ({"d": []}, {"a": 1}, False),
        ({"f": "nan"}, 1.0, False),
        ({"r": "<object>"}, "<object>", False),
    ],
)
def test_a_value_equals_what_the_test_expects(value: object, expected: object, is_equal: bool) -> None:
    assert equal(value, expected, 1e-9) is is_equal


@pytest.mark.parametrize(
    "line",
    [
        b'{"v": {}}',
        b'{"v": {"i": "no number"}}',
        b'{"v": {"t": 1, "d": 2}}',
        b'{"v": {"d": [[1, 2, 3]]}}',
        b'{"v": {"d": [4]}}',
        b'{"v": "\xff"}',
        b'{"v": 1' + 400 * b"0" + b"}",
        b'{"v": ' + 900 * b'{"t":' + b"1" + 900 * b"}" + b"}",
    ],
    ids=lambda line: line[:24].decode(errors="replace"),
)
def test_a_line_that_is_of_the_program_s_own_making_fails_its_test_and_nothing_else(line: bytes) -> None:
    tests = code.tests_in('{"tests": [{"call": "f", "returns": {"a": 1}}, {"call": "f", "returns": 0.5}]}')
    run = Finished(Ended.EXITED, 0, None, (line + b"\n") * 2, b"", 0.1, 0.1, Backend.NAMESPACES)
    found = verdicts(Job("call", tuple(tests), (b"",), 1.0, 1, count=2), Runs((run,)), 1e-9)
    assert len(found) == 2
    assert reward(found, partial=True).value == 0.0


def test_nothing_of_a_task_s_tests_is_kept_after_its_group() -> None:
    tracemalloc.start()
    try:
        for number in range(16):
            tests = [
                {"stdin": "x" * (1 << 20), "stdout": str(number)},
                {"code": f"assert f({number}) # {'x' * 100_000}"},
            ]
            task = Task("t", "t", (), None, json.dumps({"scorer": "code", "tests": tests}))
            assert len(jobs_of(Code(), code.tests_in(task.info))) == 2
            assert task_spec(task) == Code()
        del tests, task
        assert tracemalloc.get_traced_memory()[0] < 4 << 20
    finally:
        tracemalloc.stop()


def test_the_last_fenced_block_is_the_program() -> None:
    assert code_of("```\nfirst\n```\nthen\n```py\nsecond\n```\n") == "second\n"
    assert code_of("```python\nunclosed") == "unclosed"
