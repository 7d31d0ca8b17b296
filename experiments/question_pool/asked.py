"""Fixed sets of questions: words to spell backward, and greatest common divisors."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from math import gcd
from pathlib import Path

from experiments.sapo_stacked.questions import Question
from shoal.types import seed_for


@dataclass(frozen=True, slots=True)
class Asked:
    """Questions of one kind; the runs ask one half, and the warm start shows the other."""

    runs: list[Question]
    warm: list[Question]

    @classmethod
    def of(cls, plan: Mapping[str, object]) -> "Asked":
        """All questions of a plan: words by their lengths, or pairs up to a number."""
        if plan["kind"] == "words":
            words = sorted(word for word in english() if plan["shortest"] <= len(word) <= plan["longest"])
            every = [Question("words", f"s {word}", word[::-1]) for word in words]
        else:
            pairs = product(range(1, plan["highest"] + 1), repeat=2)
            every = [Question("gcd", f"g {a} {b}", str(gcd(a, b))) for a, b in pairs]
        halves = [[one for one in every if seed_for("warm", one.text) % 2 == half] for half in (0, 1)]
        return cls(*halves)

    def split(self, seed: int, training: int, held_out: int) -> tuple[list[Question], list[Question]]:
        """A seed's own training questions and held-out ones."""
        chosen = random.Random(seed_for("question pool", seed)).sample(self.runs, training + held_out)
        return chosen[:training], chosen[training:]


def english() -> set[str]:
    """The words that reasoning-gym's spell_backward asks for."""
    found = find_spec("reasoning_gym")
    assert found is not None
    assert found.origin is not None
    return set((Path(found.origin).parent / "data" / "words3to10.txt").read_text().lower().split())
