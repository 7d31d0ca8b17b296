"""Small programs, their right values, and slips that make them wrong."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.types import Json


@dataclass(frozen=True, slots=True)
class SmallProgram:
    """The source of a right function `f`, and what it takes."""

    what: str
    source: str
    slips: tuple[tuple[str, str], ...]
    """Pairs of a text of the source, and a text that makes the program wrong."""
    takes: tuple[str, ...]

    def value(self, arguments: Sequence[Json]) -> Json:
        """The right value of a call."""
        scope: dict[str, Callable[..., Json]] = {}
        exec(self.source, scope)
        return scope["f"](*arguments)


PROGRAMS = (
    SmallProgram(
        "the sum of the numbers in a list",
        "def f(a):\n    s = 0\n    for x in a:\n        s += x\n    return s\n",
        (("+=", "-="), ("+=", "="), ("s = 0", "s = 1"), ("    return s", "        return s")),
        ("list",),
    ),
    SmallProgram(
        "the largest number of a list that is not empty",
        "def f(a):\n    m = a[0]\n    for x in a:\n        if x > m:\n            m = x\n    return m\n",
        ((" > ", " < "), ("m = x", "x = m"), ("a[0]", "0"), ("return m", "return x")),
        ("list",),
    ),
    SmallProgram(
        "how many numbers of a list are even",
        "def f(a):\n    n = 0\n    for x in a:\n        if x % 2 == 0:\n            n += 1\n    return n\n",
        (("== 0", "== 1"), ("% 2", "% 3"), ("+= 1", "+= x"), ("n = 0", "n = 1")),
        ("list",),
    ),
    SmallProgram(
        "a list without its first number",
        "def f(a):\n    return a[1:]\n",
        (("[1:]", "[:1]"), ("[1:]", "[0:]"), ("[1:]", "[:-1]")),
        ("list",),
    ),
    SmallProgram(
        "the numbers of a list that are above k",
        "def f(a, k):\n    return [x for x in a if x > k]\n",
        ((" > ", " < "), ("[x for", "[k for"), ("x > k", "x")),
        ("list", "int"),
    ),
    SmallProgram(
        "the factorial of n",
        "def f(n):\n    p = 1\n    for i in range(1, n + 1):\n        p *= i\n    return p\n",
        (("n + 1", "n"), ("p = 1", "p = 0"), ("*=", "+="), ("range(1, n + 1)", "range(n + 1)")),
        ("int",),
    ),
    SmallProgram(
        "the n-th Fibonacci number, of which 0 and 1 are the 0th and the 1st",
        "def f(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
        (("a + b", "a - b"), ("0, 1", "1, 1"), ("return a", "return b"), ("range(n)", "range(n - 1)")),
        ("int",),
    ),
    SmallProgram(
        "k if it is within n and m, else the nearer of them",
        "def f(k, n, m):\n    if k < min(n, m):\n        return min(n, m)\n    return min(k, max(n, m))\n",
        ((" < ", " > "), ("min(k,", "max(k,"), ("max(n", "min(n")),
        ("int", "int", "int"),
    ),
    SmallProgram(
        "the running sums of a list",
        "def f(a):\n    r, s = [], 0\n    for x in a:\n        s += x\n        r.append(s)\n    return r\n",
        (("append(s)", "append(x)"), ("+=", "="), ("[], 0", "[], 1"), ("return r", "return s")),
        ("list",),
    ),
)


def slipped(rng: random.Random) -> tuple[SmallProgram, str]:
    """A program, and its source with a slip."""
    chosen = rng.choice(PROGRAMS)
    return chosen, chosen.source.replace(*rng.choice(chosen.slips), 1)


def argument(rng: random.Random, kind: str) -> Json:
    """An argument of a kind that `takes` names."""
    if kind == "int":
        return rng.randint(0, 9)
    return [rng.randint(-20, 20) for _ in range(rng.randint(1, 6))]
