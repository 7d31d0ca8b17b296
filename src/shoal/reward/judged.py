"""The part of a completion that a checker judges. Pure."""

from shoal import checker
from shoal.checker import Spec
from shoal.model.answer import THINK, boxed, parted, tagged

WHOLE = (checker.Format, checker.Length, checker.Language, checker.Function)
"""Checkers of the whole completion, thought included."""
UNBOXED = (checker.Exact, checker.Number, checker.ReasoningGym)
"""Checkers of a bare answer, taken out of its box; `math` looks for boxes itself."""


def judged(spec: Spec, truth: str | None, text: str) -> str | None:
    r"""The answer in a text as a checker wants it; None where a thought was cut off before any answer.

    Marks that the truth or the pattern names itself stay in place.

    >>> judged(checker.Exact(), "5", "<think>2 + 3</think><answer>\\boxed{5}</answer>")
    '5'
    """
    if isinstance(spec, WHOLE):
        return text
    named = (spec.pattern if isinstance(spec, checker.Regex) else "") or truth or ""
    if any(mark in named for mark in THINK):
        return text
    said = parted(text)
    if not said.complete:
        return None
    answer = said.answer
    if "<answer>" not in named and not isinstance(spec, checker.LLMJudge) and (inside := tagged(answer)) is not None:
        answer = inside
    if "\\boxed" not in named and isinstance(spec, UNBOXED) and (inside := boxed(answer)) is not None:
        answer = inside
    return answer
