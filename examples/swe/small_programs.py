"""Small programs with a slip as tasks in workspaces, and the lessons of a careless teacher who mends them.

    python examples/swe/small_programs.py examples/swe

writes `small.jsonl`, the tasks, and `lessons.jsonl`. A fifth of the slips is held out: no lesson and no task of
training has them. The teacher reads a program, replaces a line and says that it is done. Most of its lines are wrong,
so a model learns how to work here, and little about which line is right.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import msgspec

from shoal.environments.programs import PROGRAMS, SmallProgram
from shoal.environments.workspace import BLOCKS, program_task
from shoal.types import seed_for
from shoal.workspace.task import WorkspaceTask

TASKS = {"train": 512, "eval": 64}
LESSONS = 400
CARELESS_SHARE = 0.7


def counted(what: str, condition: str, *slips: tuple[str, str], takes: tuple[str, ...] = ("list",)) -> SmallProgram:
    """Counts the numbers of a list that meet a condition."""
    head = f"def f(a{', k' if len(takes) > 1 else ''}):\n    n = 0\n    for x in a:\n"
    source = f"{head}        if {condition}:\n            n += 1\n    return n\n"
    return SmallProgram(what, source, (*slips, ("+= 1", "+= 2"), ("n = 0", "n = 1")), takes)


def returned(what: str, value: str, *slips: tuple[str, str], takes: tuple[str, ...] = ("list",)) -> SmallProgram:
    """Returns one expression."""
    names = {("list",): "a", ("list", "int"): "a, k", ("int",): "n", ("int", "int"): "n, k"}[takes]
    return SmallProgram(what, f"def f({names}):\n    return {value}\n", slips, takes)


def folded(what: str, start: str, step: str, *slips: tuple[str, str]) -> SmallProgram:
    """Goes through a list with a running value."""
    source = f"def f(a):\n    s = {start}\n    for x in a:\n        {step}\n    return s\n"
    return SmallProgram(what, source, slips, ("list",))


LISTED, NUMBER, NUMBERS = ("list", "int"), ("int",), ("int", "int")
MORE = (
    counted("how many numbers of a list are odd", "x % 2 == 1", ("== 1", "== 0"), ("% 2", "% 3")),
    counted("how many numbers of a list are below 0", "x < 0", (" < ", " > "), ("< 0", "< 9")),
    counted("how many numbers of a list are above k", "x > k", (" > ", " < "), ("> k", "> 0"), takes=LISTED),
    counted("how many numbers of a list are not k", "x != k", ("!=", "=="), ("!= k", "> k"), takes=LISTED),
    folded("the sum of the squares of a list", "0", "s += x * x", ("x * x", "x + x"), ("+=", "-="), ("s = 0", "s = 1")),
    folded("the product of a list", "1", "s *= x", ("*=", "+="), ("s = 1", "s = 0"), ("s = 1", "s = 2")),
    folded(
        "the smallest number of a list", "a[0]", "s = min(s, x)", ("min", "max"), ("a[0]", "0"), ("(s, x)", "(x, x)")
    ),
    folded("the sum of a list from which each number is subtracted", "0", "s -= x", ("-=", "+="), ("s = 0", "s = 1")),
    folded("the length of a list", "0", "s += 1", ("+= 1", "+= x"), ("+= 1", "+= 2"), ("s = 0", "s = 1")),
    folded("the sum of the sizes of a list", "0", "s += abs(x)", ("abs(x)", "x"), ("+=", "-="), ("s = 0", "s = 1")),
    returned("the last number of a list", "a[-1]", ("[-1]", "[0]"), ("[-1]", "[-1:]"), ("[-1]", "[1:]")),
    returned("a list backward", "a[::-1]", ("[::-1]", "[::1]"), ("[::-1]", "[:-1]"), ("[::-1]", "[::-2]")),
    returned("a list without its last number", "a[:-1]", ("[:-1]", "[:1]"), ("[:-1]", "[:-2]"), ("[:-1]", "[1:]")),
    returned("the doubles of a list", "[x * 2 for x in a]", ("* 2", "+ 2"), ("* 2", "* 3"), ("[x * 2", "[x")),
    returned("the negatives of a list", "[-x for x in a]", ("[-x", "[x"), ("[-x", "[abs(x)"), ("[-x", "[-x - 1")),
    returned(
        "a list without numbers below 0", "[x for x in a if x >= 0]", (">=", "<"), ("x >= 0", "x"), (">= 0", ">= 9")
    ),
    returned("the mean of a list, rounded down", "sum(a) // len(a)", ("//", "*"), ("//", "%"), ("sum", "max")),
    returned(
        "the largest number less the smallest", "max(a) - min(a)", (" - ", " + "), ("max", "min"), ("min(a)", "a[0]")
    ),
    returned("every second number of a list", "a[::2]", ("[::2]", "[1::2]"), ("[::2]", "[::3]"), ("[::2]", "[:2]")),
    returned("a list from small to large", "sorted(a)", ("sorted(a)", "sorted(a)[::-1]"), ("sorted(a)", "a")),
    returned(
        "a list with k added to each number",
        "[x + k for x in a]",
        (" + ", " - "),
        (" + ", " * "),
        ("[x", "[k"),
        takes=LISTED,
    ),
    returned(
        "the first k numbers of a list",
        "a[:k]",
        ("[:k]", "[k:]"),
        ("[:k]", "[:k + 1]"),
        ("[:k]", "[:-k]"),
        takes=LISTED,
    ),
    returned(
        "a list with k at its end", "a + [k]", ("a + [k]", "[k] + a"), ("[k]", "[0]"), ("[k]", "[k, k]"), takes=LISTED
    ),
    returned(
        "k times the length of a list", "k * len(a)", (" * ", " + "), ("len", "sum"), ("k *", "2 *"), takes=LISTED
    ),
    returned("the square of n", "n * n", (" * ", " + "), ("n * n", "n * 2"), ("n * n", "n ** 3"), takes=NUMBER),
    returned(
        "the sum of the numbers from 1 to n", "sum(range(n + 1))", ("n + 1", "n"), ("n + 1", "n + 2"), takes=NUMBER
    ),
    returned(
        "true if n is even, else false", "n % 2 == 0", ("==", "!="), ("== 0", "== 1"), ("% 2", "% 3"), takes=NUMBER
    ),
    returned(
        "n less k, or 0 if k is larger",
        "max(n - k, 0)",
        ("max", "min"),
        ("n - k", "k - n"),
        ("0)", "1)"),
        takes=NUMBERS,
    ),
    returned("twice n plus k", "2 * n + k", ("2 *", "3 *"), (" + ", " - "), ("+ k", "+ n"), takes=NUMBERS),
    returned(
        "the distance of n and k",
        "abs(n - k)",
        (" - ", " + "),
        ("abs(n - k)", "n - k"),
        ("n - k", "n - 1"),
        takes=NUMBERS,
    ),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A slip in a program."""

    program: SmallProgram
    wrong: str

    @property
    def held_out(self) -> bool:
        """Whether no lesson and no task of training has it; this is drawn from its text."""
        return random.Random(seed_for("small programs", self.wrong)).random() < 0.2

    def mend(self) -> tuple[int, str]:
        """Number and text of the line that mends it."""
        pairs = zip(self.wrong.splitlines(), self.program.source.splitlines(), strict=True)
        return next((number, right) for number, (wrong, right) in enumerate(pairs, 1) if wrong != right)


def faults() -> Sequence[Fault]:
    """Each slip of each program, mixed."""
    every = [
        Fault(one, wrong)
        for one in (*PROGRAMS, *MORE)
        for slip in one.slips
        if (wrong := one.source.replace(*slip, 1)) != one.source
    ]
    random.Random(0).shuffle(every)
    return every


def tasks() -> Iterator[WorkspaceTask]:
    """Tasks of both splits, each fault about as often as another of its split, with other arguments each time."""
    for split, count in TASKS.items():
        chosen = [fault for fault in faults() if fault.held_out == (split == "eval")]
        for number, fault in enumerate(islice(cycle(chosen), count)):
            name, rng = f"{split}/{number}", random.Random(seed_for("small programs", split, number))
            yield msgspec.structs.replace(program_task(name, fault.program, fault.wrong, rng), split=split)


def lessons() -> Iterator[dict[str, object]]:
    """Conversations about faults of training, as rows of a supervised stage, without end."""
    rng = random.Random(1)
    for fault in cycle([fault for fault in faults() if not fault.held_out]):
        number, line = fault.mend()
        lines, right = fault.wrong.splitlines(), fault.program.source.splitlines()
        if rng.random() < CARELESS_SHARE:
            number = rng.randint(1, len(lines))
            line = right[number - 1].replace(*rng.choice(fault.program.slips))
        task = program_task("lesson", fault.program, fault.wrong, rng)
        said = [
            ("system", BLOCKS),
            ("user", task.problem),
            ("assistant", "```bash\ncat -n program.py\n```"),
            ("user", "".join(f"{n:6}\t{text}\n" for n, text in enumerate(lines, 1))),
            ("assistant", f"```bash\nsed -i '{number}c\\{line}' program.py\n```"),
            ("user", "(it printed nothing)"),
            ("assistant", "DONE"),
        ]
        yield {"messages": [{"role": role, "content": text} for role, text in said]}


def write(folder: Path) -> None:
    """Writes the tasks and the lessons."""
    (folder / "small.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, tasks())))
    rows = islice(lessons(), LESSONS)
    (folder / "lessons.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
