"""A small package with tests of all sorts, as a folder."""

from pathlib import Path

SOURCE = '''"""Numbers."""

LIMIT = 10


def clipped(number: int, most: int = LIMIT) -> int:
    """The number, at most `most`."""
    if number > most:
        return most
    return number


def total(numbers: list[int]) -> int:
    """The sum."""
    result = 0
    for number in numbers:
        result += number
    return result


def endless(number: int) -> int:
    """Counts down to zero."""
    while number > 0:
        number -= 1
    return number
'''
TESTS = """import unittest
from pathlib import Path

import pytest
from hypothesis import given, strategies

from numbers_of import clipped, endless, total


@pytest.mark.parametrize("number", range(12))
def test_clipped(number):
    assert clipped(number) == min(number, 10)


@pytest.mark.parametrize("n", range(12))
def test_total(n):
    assert total(list(range(n))) == n * (n - 1) // 2


def test_endless():
    assert endless(3) == 0


def test_red():
    assert clipped(1) == 2


def test_flaky():
    count = Path("count")
    count.write_text(count.read_text() + "x" if count.exists() else "x")
    assert clipped(len(count.read_text())) != 3


class TestBackends(unittest.TestCase):
    def test_partly_skipped(self):
        for backend in ("this", "other"):
            with self.subTest(backend):
                if backend == "other":
                    self.skipTest("it is not here")
                assert clipped(4) == 4


@given(strategies.integers())
def test_drawn(number):
    assert clipped(number) <= 10
"""


def written(folder: Path) -> Path:
    """The package in a folder."""
    (folder / "src" / "numbers_of").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "src" / "numbers_of" / "__init__.py").write_text(SOURCE)
    (folder / "tests" / "test_numbers_of.py").write_text(TESTS)
    return folder
