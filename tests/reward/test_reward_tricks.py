"""What a program returns or raises cannot make a test true that a right program passes by its work."""

import pytest
from test_reward_code import scored, values

IMPORTS = "import math, pytest\nfrom itertools import islice\nfrom pytest import approx\nfrom solution import f\n"
FIXTURE = "@pytest.fixture(scope='module')\ndef it():\n    if f(2) != 3: pytest.skip('no')\n    return 1\n"
PASSES = "\ndef test_first(): assert f(1) == 1\n"
SAME = "def f(x): return x"

WRONG = {
    "an end of iteration ends the test's loop": (
        "def test_a():\n    for x in map(f, [1, 2]): assert x == 3",
        "def f(x): raise StopIteration",
    ),
    "an end of iteration by another name": (
        "def test_a(): assert all(map(f, [1, 2]))",
        "class Done(StopIteration): pass\ndef f(x): raise Done",
    ),
    "NaN gets lost in max()": (
        "def test_a(): assert max([0.0, *(abs(f(x) - x) for x in (1, 2))]) < 1e-6",
        "def f(x): return float('nan')",
    ),
    "NaN where a test speaks of it": (
        "def test_a(): assert max(0.0, abs(f(1) - 1)) < 1e-6  # not nan",
        "def f(x): return float('nan')",
    ),
    "NaN in a complex number": (
        "def test_a(): assert not abs(f(1) - 1) > 1e-6",
        "def f(x): return complex('nan')",
    ),
    "infinity against a bound that it raises": (
        "def test_a(): assert abs(f(1) - 3) <= 1e-6 * max(3, abs(f(1)))",
        "def f(x): return 1e999",
    ),
    "NaN through a function in C": (
        "def test_a(): assert not math.fabs(f(1)) > 1e-6",
        "def f(x): return float('NaN'.lower())",
    ),
    "infinities whose difference is NaN": (
        "def test_a(): assert max(0.0, f(1) - f(2)) < 1e-6",
        "def f(x): return [float('inf')][0]",
    ),
    "an endless iterator has any member": ("def test_a(): assert 7 in f(1)", "from itertools import count as f"),
    "an endless iterator ends a loop": (
        "def test_a(): assert all(x >= 0 for x in f(1))",
        "from itertools import count as f",
    ),
    "a huge range has any member": ("def test_a(): assert 7 in f(1)", "def f(x): return range(10 ** 6)"),
    "a skip by the program's value": (f"def test_a():\n    if f(2) != 3: pytest.skip('no')\n{PASSES}", SAME),
    "an expected failure by it": (f"def test_a():\n    if f(2) != 3: pytest.xfail('no')\n{PASSES}", SAME),
    "a mark by it": (f"@pytest.mark.skipif(f(2) != 3, reason='no')\ndef test_a(): assert False\n{PASSES}", SAME),
    "a mark by a name for it": (
        f"no = f(2) != 3\n@pytest.mark.skipif(no, reason='no')\ndef test_a(): assert False\n{PASSES}",
        SAME,
    ),
    "a fixture that skips by it": (f"{FIXTURE}def test_a(it): assert False\n{PASSES}", SAME),
    "an object where an error is expected": (
        "def test_a():\n    with pytest.raises(TypeError): f('a')",
        "def f(x): return object()",
    ),
    "an end where an error is expected": (
        "def test_a():\n    with pytest.raises(RuntimeError): f('a')",
        "import os\ndef f(x): os._exit(0)",
    ),
    "an error that wants more than a text": (
        "def test_a():\n    with pytest.raises(TypeError): f('a')",
        "def f(x): 'é'.encode('ascii')",
    ),
}
RIGHT = {
    "infinity that no test looks at": (
        "def test_a(): assert f(1)[0]['b'] == 3 and f(1)[0]['c'] > 10**9 and f(f(1)) is not None",
        "def f(x): return [{'b': 3, 'c': 1e999}, 1e999 - 1e999]",
    ),
    "an end of iteration that is expected": (
        "def test_a():\n    with pytest.raises(StopIteration): f(1)",
        "def f(x): raise StopIteration",
    ),
    "NaN that is expected": (
        "def test_a(): assert math.isnan(f(1)) and f(1) != f(1) and f(1) == approx(math.nan, nan_ok=True)",
        "def f(x): return float('nan')",
    ),
    "infinity that is expected": ("def test_a(): assert f(1) == float('inf')", "def f(x): return float('inf')"),
    "the begin of an endless iterator": (
        "def test_a(): assert list(islice(f(1), 3)) == [1, 2, 3]",
        "from itertools import count as f",
    ),
    "a member of an iterator": ("def test_a(): assert 5 in f(1)", "def f(x): yield from (4, 5)"),
    "a skip without the program": (f"def test_a(): pytest.skip('slow')\n{PASSES}", SAME),
    "a skip by a mark": (f"{PASSES}@pytest.mark.skip\ndef test_a(): assert False", SAME),
    "a skip by a mark beside a value of the program": (
        f"N = f(2)\n{PASSES}@pytest.mark.skipif(True, reason='later')\ndef test_a(): assert False\n"
        "@pytest.mark.skip(reason='later')\nclass TestB:\n    def test_b(self): assert False",
        SAME,
    ),
    "an expected failure by a mark": (f"{PASSES}@pytest.mark.xfail\ndef test_a(): assert f(1) == 2", SAME),
    "an error of a text and more": (
        "def test_a():\n    with pytest.raises(UnicodeError): f('a')",
        "def f(x): 'é'.encode('ascii')",
    ),
}


@pytest.mark.parametrize("trick", WRONG)
def test_a_wrong_program_is_not_made_right_by(trick: str) -> None:
    text, program = WRONG[trick]
    assert values(scored([{"pytest": IMPORTS + text}], [program])) == [0.0]


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_program_stays_right_with(case: str) -> None:
    text, program = RIGHT[case]
    assert values(scored([{"pytest": IMPORTS + text}], [program])) == [1.0]


def test_statements_are_not_made_true_by_values_either() -> None:
    loop = "for x in map(f, [1, 2]): assert x == 3"
    tricks = {
        loop: "def f(x): raise StopIteration",
        "assert not abs(f(1) - 1) > 1e-6": "def f(x): return float('nan')",
        "try: f(1)\nexcept RuntimeError: pass": "import os\ndef f(x): os._exit(0)",
    }
    assert [values(scored([{"code": text}], [program])) for text, program in tricks.items()] == [[0.0]] * len(tricks)
