"""Sums of two-digit numbers, of which the model gets few right at first."""

import shoal


@shoal.environment("two-digits")
class TwoDigits:
    """8,100 questions; a fifth of them, chosen by their text, is held out."""

    def draw(self, rng):
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        return shoal.Question(f"What is {a} + {b}? Answer with the number only.", str(a + b), scorer="number")
