"""Questions show a function's effect on a word, and ask for the missing part of its program after `s`.

    f('sun')='nus'    ->    [::-1]        (def f(s): return s[::-1])

The embedded model can learn this within a minute. Only unit tests can tell whether an answer is right: `[::-1]` and
`[-1::-1]` are.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from shoal.types import Json, seed_for

EXPRESSIONS: Mapping[str, Callable[[str], str]] = {
    "[::-1]": lambda word: word[::-1],
    ".upper()": str.upper,
    "*2": lambda word: word * 2,
    "[0]": lambda word: word[0],
    "[-1]": lambda word: word[-1],
    "[1:]": lambda word: word[1:],
    "[:-1]": lambda word: word[:-1],
    ".title()": str.title,
}
"""Answers with their effect on a word."""
RARE = ("[-1]", "[1:]", "*2")
"""Expressions that the embedded model rarely sees, which leaves them for reinforcement learning."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
HIDDEN = 2
"""Words in a program's tests, in addition to the shown word."""


def rows() -> Iterator[dict[str, Json]]:
    """Questions without end, each different, as rows of a data set for the `code` checker."""
    generator = random.Random(seed_for("small programs"))
    asked = set()
    while True:
        answer = generator.choice(list(EXPRESSIONS))
        words = ["".join(generator.sample(LETTERS, generator.randint(3, 5))) for _ in range(1 + HIDDEN)]
        prompt = f"f('{words[0]}')='{EXPRESSIONS[answer](words[0])}'"
        if prompt not in asked:
            asked.add(prompt)
            tests: list[Json] = [{"call": "f", "args": [word], "returns": EXPRESSIONS[answer](word)} for word in words]
            yield {"prompt": prompt, "answer": answer, "info": {"tests": tests}}


def write(path: Path, count: int) -> None:
    """Writes the first questions as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in islice(rows(), count)))


def slip(generator: random.Random, answer: str) -> str:
    """Samples another expression."""
    return generator.choice([expression for expression in EXPRESSIONS if expression != answer])
